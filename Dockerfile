# One image for daemon, agent and workers; docs/DOCKER.md says how to run it. For CUDA, take a base image that has the driver's libraries
# and a torch built for it: torch's wheel decides, the image only brings what it needs.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE MANIFEST.in constraints.txt ./
COPY elasticrl elasticrl
# The samples that go under share/elasticrl: pyproject.toml names them, and a build without them fails.
COPY configs configs
COPY docs docs
COPY systemd systemd
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG EXTRAS=train,report
# procps, iproute2: what elasticrl doctor and a person at the prompt want.
RUN apt-get update && apt-get install -y --no-install-recommends procps iproute2 && rm -rf /var/lib/apt/lists/*
COPY constraints.txt configs/locks/daemon.txt /tmp/
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --require-hashes --no-deps --requirement /tmp/daemon.txt && \
    pip install --no-cache-dir --constraint /tmp/constraints.txt "$(ls /wheels/*.whl)[${EXTRAS}]" && rm /tmp/constraints.txt /tmp/daemon.txt
# As on the host: who owns the mounted folders.
ARG UID=980
ARG GID=980
RUN groupadd --gid ${GID} elasticrl && useradd --no-log-init --uid ${UID} --gid ${GID} --home-dir /var/lib/elasticrl elasticrl \
    && install -d -o elasticrl -g elasticrl -m 0750 /run/elasticrl /var/lib/elasticrl /var/log/elasticrl
USER elasticrl
STOPSIGNAL SIGTERM
ENTRYPOINT ["elasticrl"]
CMD ["--help"]
