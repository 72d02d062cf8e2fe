# The image that launch/trainjob.yaml names: make image IMAGE=NAME
FROM python:3.11.14-slim-bookworm

# g++ is what model.compile=true compiles with.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir uv==0.13.9

# PyTorch for another CUDA, or without any, comes from the index that "Get started" on pytorch.org shows for it;
# empty: the newest CUDA, with the versions of requirements.txt.
ARG TORCH_INDEX=""
# The user below cannot write bytecode: each start would compile torch.
ARG UV_COMPILE_BYTECODE=1
WORKDIR /workspace
COPY pyproject.toml requirements.txt ./
RUN if [ -n "$TORCH_INDEX" ]; then \
        UV_DEFAULT_INDEX="$TORCH_INDEX" uv pip install --system --no-cache torch torchvision \
        && sed -i -E '/^(torch|torchvision|triton|nvidia-|cuda-)/d' requirements.txt; \
    fi \
    && uv pip install --system --no-cache --requirements pyproject.toml --extra buckets --extra dali --extra table \
        --constraints requirements.txt

# Without a user of this number, packages that ask for its name fail.
RUN useradd --uid 1000 --create-home trainer \
    && install --directory --owner=trainer outputs data data/cache
COPY --chown=trainer . .
USER 1000

# For NVIDIA's container runtime, which brings the driver.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PYTHONUNBUFFERED=1
CMD ["python", "train.py"]
