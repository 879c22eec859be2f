# One image for every process of a cluster: Ray nodes, driver, status page, reward server. docs/cluster.md has the commands.
#
#   docker build -t flowcredit .                                                            # CPU
#   docker build -t flowcredit:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .       # NVIDIA; the host has the driver
#
# Without Docker: buildah bud --isolation chroot --format docker (another format drops the health check), BASE being an image
# of `debootstrap --variant=minbase bookworm`.
#
# Python packages have the versions of constraints.txt, Debian's those of its release.
ARG BASE=debian:bookworm-20250520-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=ocr,tensorboard
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/flowcredit/bin:$PATH
WORKDIR /source
COPY constraints.txt .
RUN python3 -m venv /opt/flowcredit \
    && pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" \
        --extra-index-url https://pypi.org/simple torch
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

FROM ${BASE}
# bash and wget: KubeRay's commands and probes use them. profile.d: a login shell drops PATH.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bash ca-certificates python3 tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home flowcredit \
    && install --directory --owner=flowcredit --group=flowcredit /runs \
    && echo "PATH=/opt/flowcredit/bin:\$PATH" > /etc/profile.d/flowcredit.sh
COPY --from=build /opt/flowcredit /opt/flowcredit
ENV PATH=/opt/flowcredit/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/flowcredit
ENTRYPOINT ["/usr/bin/tini", "--"]
# The status page needs FLOWCREDIT_TOKEN and FLOWCREDIT_BOARD; other services give their own command and health check.
CMD ["flowcredit", "serve", "--host", "0.0.0.0"]
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s \
    CMD ["wget", "--quiet", "--output-document=/dev/null", "http://127.0.0.1:8400/healthz"]
EXPOSE 8400
