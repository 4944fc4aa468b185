# In place of redis:*-alpine: Debian's server, which speaks TLS, with the user and the folder of that image.
FROM blitzscale-test-redis:bookworm
RUN usermod --uid 999 redis && groupmod --gid 1000 redis && mkdir /data && chown redis:redis /data
VOLUME /data
WORKDIR /data
CMD ["redis-server"]
