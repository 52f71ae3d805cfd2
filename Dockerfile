# The three images: docker build --target engine|router|operator .
#
# They run as user 65532 with a read-only root: all that a process writes goes under /tmp. Every version comes from
# constraints.txt; for a base that cannot change either, give PYTHON_DIGEST. Shells and tools are the base's, except in
# `engine`: Triton compiles a launcher for each of its kernels with a C compiler while it serves.

ARG PYTHON_IMAGE=docker.io/library/python:3.13-slim
ARG PYTHON_DIGEST=

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
ENV PIP_PYTHON=/opt/pagefleet/bin/python
WORKDIR /src
COPY constraints.txt images/requirements-build.txt images/dependencies.py ./
# No pip in the environment: what serves cannot install.
RUN python -m venv --without-pip /opt/pagefleet \
    && python -m venv --without-pip /opt/backend \
    && pip --python /opt/backend/bin/python install --requirement requirements-build.txt

# Libraries first, and our own beside them: an image has one layer of libraries, gigabytes for the engine, that stays as it
# is until a pyproject.toml or a version changes, and a small one that a change of code replaces.
FROM build AS build-router
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/log/*
COPY protocol/pyproject.toml protocol/
COPY text/pyproject.toml text/
COPY console/pyproject.toml console/
COPY router/pyproject.toml router/
RUN python dependencies.py --extra traces --extra picker protocol text console router > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt
COPY protocol protocol
COPY text text
COPY console console
COPY router router
COPY pagefleet pagefleet
# What the router does for every request is compiled; the types of its siblings are where mypy is told to look.
RUN HATCH_BUILD_HOOK_ENABLE_MYPYC=true MYPYPATH=/src/protocol:/src/text:/src/console \
    /opt/backend/bin/python dependencies.py --wheels dist protocol text console router pagefleet \
    && pip install --no-deps --prefix /opt/own dist/*.whl

FROM build AS build-operator
COPY protocol/pyproject.toml protocol/
COPY download/pyproject.toml download/
COPY operator/pyproject.toml operator/
RUN python dependencies.py protocol download operator > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt
COPY protocol protocol
COPY download download
COPY operator operator
COPY pagefleet pagefleet
RUN /opt/backend/bin/python dependencies.py --wheels dist protocol download operator pagefleet \
    && pip install --no-deps --prefix /opt/own dist/*.whl

FROM build AS build-engine
# The kernels of the CPU are compiled as our own wheel is made.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* /var/log/*
# PyPI's torch is built for CUDA. For machines without a GPU: https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://pypi.org/simple
COPY protocol/pyproject.toml protocol/
COPY download/pyproject.toml download/
COPY kernels/pyproject.toml kernels/
COPY text/pyproject.toml text/
COPY kv/pyproject.toml kv/
COPY console/pyproject.toml console/
COPY engine/pyproject.toml engine/
RUN pip install --index-url "$TORCH_INDEX" --constraint constraints.txt torch
RUN python dependencies.py --extra traces protocol download kernels text kv console engine > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt
COPY protocol protocol
COPY download download
COPY kernels kernels
COPY text text
COPY kv kv
COPY console console
COPY engine engine
COPY pagefleet pagefleet
RUN PAGEFLEET_NATIVE=required \
    /opt/backend/bin/python dependencies.py --wheels dist protocol download kernels text kv console engine pagefleet \
    && pip install --no-deps --prefix /opt/own dist/*.whl

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS runtime
LABEL org.opencontainers.image.vendor="pagefleet" \
    org.opencontainers.image.licenses="Apache-2.0"
# Some libraries look the user up by its number.
RUN echo 'nonroot:x:65532:' >> /etc/group \
    && echo 'nonroot:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd
ENV PATH=/opt/pagefleet/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 HOME=/tmp
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
EXPOSE 8000
# It becomes the verb's program, which so is process 1 and gets SIGTERM itself.
ENTRYPOINT ["pagefleet"]

FROM runtime AS engine
LABEL org.opencontainers.image.title="pagefleet engine" \
    org.opencontainers.image.description="The paged-attention inference engine and its OpenAI server"
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/log/*
ENV XDG_CACHE_HOME=/tmp/.cache CC=/usr/bin/gcc
COPY --from=build-engine /opt/pagefleet /opt/pagefleet
COPY --from=build-engine /opt/own /opt/pagefleet
USER 65532:65532
CMD ["serve", "--help"]
# Last: every commit has another revision, and no layer above is made anew for it.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version="$VERSION" org.opencontainers.image.revision="$REVISION"

FROM runtime AS router
LABEL org.opencontainers.image.title="pagefleet router" \
    org.opencontainers.image.description="The prefix-aware, load-aware HTTP front door of engines"
COPY --from=build-router /opt/pagefleet /opt/pagefleet
COPY --from=build-router /opt/own /opt/pagefleet
USER 65532:65532
CMD ["route", "--help"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version="$VERSION" org.opencontainers.image.revision="$REVISION"

FROM runtime AS operator
LABEL org.opencontainers.image.title="pagefleet operator" \
    org.opencontainers.image.description="Turns InferenceServices into engines and routers, and downloads models"
COPY --from=build-operator /opt/pagefleet /opt/pagefleet
COPY --from=build-operator /opt/own /opt/pagefleet
USER 65532:65532
CMD ["operate", "--help"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version="$VERSION" org.opencontainers.image.revision="$REVISION"
