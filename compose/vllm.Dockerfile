# The image of workers that serve with vLLM: vLLM's own, and beside it an environment without torch for the worker.
# Those of the other services are in Dockerfile.
#
#   docker build -f compose/vllm.Dockerfile -t blitzscale-worker:0.1.0-vllm .
#   docker build -f compose/vllm.Dockerfile -t blitzscale-worker:0.1.0-vllm-cpu \
#       --build-arg VLLM_IMAGE=vllm/vllm-openai-cpu:v0.32.0 --build-arg VLLM_PYTHON=/opt/venv/bin/python .
#
# It has not been built yet.

# The version that the tests run on.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${VLLM_IMAGE} AS build
# The Python that has vLLM; the worker's environment is made of it, too, and without its packages.
ARG VLLM_PYTHON=/usr/bin/python3
# vLLM's pip installs into /venv, which has none of its own.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_PYTHON=/venv/bin/python
RUN "${VLLM_PYTHON}" -m venv --without-pip /venv
WORKDIR /app
COPY pyproject.toml constraints.txt constraints-cu12.txt README.md LICENSE ./
RUN mkdir -p shared services compose && touch shared/__init__.py services/__init__.py compose/__init__.py
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST
RUN "${VLLM_PYTHON}" -m pip install -c constraints.txt -c constraints-cu12.txt '.[worker-vllm]'
COPY . .
RUN "${VLLM_PYTHON}" -m pip install --no-deps --force-reinstall . && \
    "${VLLM_PYTHON}" -m pip wheel --no-deps --wheel-dir /wheels ./services/worker/vllm

FROM ${VLLM_IMAGE} AS worker
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="BlitzScale" org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG VLLM_PYTHON=/usr/bin/python3
COPY --from=build /wheels /wheels
# All of ours that vLLM's environment gets: none of its packages changes.
RUN "${VLLM_PYTHON}" -m pip install --no-index --no-deps --no-cache-dir --break-system-packages /wheels/*.whl && \
    useradd --uid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin blitz && \
    mkdir --mode 1777 /cache
COPY --from=build /venv /venv
USER blitz
WORKDIR /app
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/venv/bin:$PATH
# A place for vLLM to write, and to load code from: it compiles kernels.
ENV HOME=/cache TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor
ENV BLITZ_WORKER_ENGINE=none BLITZ_WORKER_ENGINES=vllm BLITZ_VLLM_PYTHON=${VLLM_PYTHON}
ENV BLITZ_HEALTH_PORT=9090 BLITZ_HEALTH_HOST=0.0.0.0
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "compose.workers"]
