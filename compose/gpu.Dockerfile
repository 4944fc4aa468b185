# The image of workers on NVIDIA GPUs; those of the other services are in Dockerfile.
#
#   docker build -f compose/gpu.Dockerfile -t blitzscale-worker:0.1.0-gpu .
#   docker build -f compose/gpu.Dockerfile -t blitzscale-worker:0.1.0-gpu --build-arg DEVICE=gpu-cu12 \
#       --build-arg CUDA_IMAGE=nvidia/cuda:12.6.3-devel-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .
#
# Where the compiler, torch, FlashInfer's kernels and UCX are of one CUDA. It has not been built yet.

ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
# Of the same release as CUDA_IMAGE's: the Python of one runs in the other.
ARG SYSTEM_IMAGE=ubuntu:24.04

# UCX's wheels come without verbs, which RDMA needs.
FROM ${CUDA_IMAGE} AS ucx
RUN apt-get update && apt-get install -y --no-install-recommends \
        autoconf automake ca-certificates g++ git libibverbs-dev librdmacm-dev libtool make pkg-config && \
    rm -rf /var/lib/apt/lists/*
# That of the wheel in constraints-cu12.txt and constraints-cu13.txt, with which ucxx was built.
ARG UCX_VERSION=1.21.0
ARG UCX_SOURCE=https://github.com/openucx/ucx
RUN git clone --depth 1 --branch "v${UCX_VERSION}" "${UCX_SOURCE}" /ucx && cd /ucx && ./autogen.sh && \
    ./contrib/configure-release --prefix=/opt/ucx --enable-mt --with-cuda=/usr/local/cuda --with-verbs --with-rdmacm \
        --without-java --without-go && \
    make -j "$(nproc)" install && rm -r /ucx

FROM ${CUDA_IMAGE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends binutils g++ python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/venv/bin:$PATH
RUN python3 -m venv /venv
WORKDIR /app
COPY pyproject.toml constraints.txt constraints-cu12.txt constraints-cu13.txt README.md LICENSE ./
RUN mkdir -p shared services compose && touch shared/__init__.py services/__init__.py compose/__init__.py
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST
# PyPI's torch is of CUDA 13: empty for gpu-cu13.
ARG TORCH_INDEX=
ARG DEVICE=gpu-cu13
RUN pip install ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} "$(sed -n '/^torch==/p' constraints.txt)"
RUN pip install -c constraints.txt -c "constraints-${DEVICE#gpu-}.txt" ".[${DEVICE}]" && \
    rm -rf /venv/lib/python3*/site-packages/libucx/lib /venv/lib/python3*/site-packages/torch/test
# What compiles kernels comes before all else that changes: they take an hour.
COPY shared/ shared/
COPY compose/__init__.py compose/
COPY compose/kernels/ compose/kernels/
COPY services/__init__.py services/
COPY services/worker/__init__.py services/worker/
COPY services/worker/engine/__init__.py services/worker/engine/prebuilt_kernels.py services/worker/engine/
ARG CAPABILITIES=8.0,9.0a
ARG HEAD_DIMS=64,128
ENV CUDA_HOME=/usr/local/cuda
RUN python -m compose.kernels --arch "${CAPABILITIES}" --head-dims "${HEAD_DIMS}" --work /tmp/kernels && \
    rm -r /tmp/kernels
COPY . .
RUN pip install --no-deps --force-reinstall .

FROM ${SYSTEM_IMAGE} AS worker
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="BlitzScale" org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# gcc and Python's headers: Triton compiles how its kernels are launched.
RUN apt-get update && apt-get install -y --no-install-recommends \
        gcc ibverbs-providers libc6-dev libibverbs1 librdmacm1 python3-dev && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin blitz
COPY --from=ucx /opt/ucx /opt/ucx
COPY --from=build /venv /venv
USER blitz
WORKDIR /app
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/venv/bin:$PATH
# What the container toolkit brings in: the driver.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV LD_LIBRARY_PATH=/opt/ucx/lib RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true
# Kernels are there; /cache is a place to write, and to load code from.
ENV FLASHINFER_DISABLE_JIT=1 FLASHINFER_WORKSPACE_BASE=/cache \
    TRITON_CACHE_DIR=/cache/triton CUPY_CACHE_DIR=/cache/cupy
ENV BLITZ_WORKER_DEVICE=cuda BLITZ_HEALTH_PORT=9090 BLITZ_HEALTH_HOST=0.0.0.0
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "compose.workers"]
