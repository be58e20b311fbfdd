# The gateway and the command line.   docker build -t polar .   docker run -p 8399:8399 -v polar:/data polar
#
# For a CPU-only PyTorch pass PyTorch's CPU index as --build-arg PIP_EXTRA_INDEX_URL=...; without a network, wheels from
# a folder: --build-arg PIP_ARGS="--no-index --find-links wheelhouse".
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG PIP_ARGS=""
ARG PIP_EXTRA_INDEX_URL=""
ARG EXTRAS=local,docker,postgres

# The workspace of a rollout is a git repository. The base image may have git already.
RUN command -v git >/dev/null || (apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*)

WORKDIR /src
COPY . .
RUN python3 -m pip install --no-cache-dir --root-user-action=ignore ${PIP_ARGS} -c constraints.txt ".[${EXTRAS}]" \
    && rm -rf /src/* \
    && useradd --create-home --uid 1000 polar \
    && install -d -o polar /data

USER polar
WORKDIR /data
ENV POLAR_HOME=/data
VOLUME /data
EXPOSE 8399
HEALTHCHECK --interval=30s --start-period=30s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8399/readyz', timeout=3)"]
ENTRYPOINT ["polar"]
# On an address other than loopback only keys made by `polar session new` are accepted.
CMD ["serve", "--host", "0.0.0.0"]
