# In place of jaegertracing/jaeger: takes spans by OTLP over HTTP and answers the two questions that tests ask.
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE}
ARG PIP_INDEX_URL
RUN python -m pip install --no-deps --target /app opentelemetry-proto protobuf googleapis-common-protos
COPY span_sink.py /app/
USER 10001
WORKDIR /app
ENTRYPOINT ["python", "span_sink.py"]
