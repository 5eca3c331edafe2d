# A serving image: no torch, no compiler, no root. Never built where Quill is developed (there is no
# Docker engine there); it was checked with hadolint.
#   docker build --target cpu -t quill .
#   docker run -v /srv/quill:/srv/quill:ro -p 50051:50051 quill
# /srv/quill holds bundle/, tls.crt, tls.key, ca.crt and keys.json.

FROM python:3.11-slim-bookworm AS build
WORKDIR /build
COPY requirements-serve.txt ./
RUN python -m venv /opt/quill \
    && /opt/quill/bin/pip install --no-cache-dir --require-hashes -r requirements-serve.txt
COPY pyproject.toml README.md LICENSE __init__.py __main__.py cache.py client.py command_table.py json_records.py pins.py tokenizer_growth.py ./
COPY model ./model
COPY export ./export
COPY server ./server
COPY protos ./protos
COPY loadtest ./loadtest
# Quill's own operators. What they are compiled with stays behind, as all of this stage but the venv.
RUN apt-get update && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*
RUN /opt/quill/bin/pip install --no-cache-dir --no-deps . \
    && cd / && /opt/quill/bin/python -m quill.export.operators.build

FROM python:3.11-slim-bookworm AS cpu
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin quill
COPY --from=build /opt/quill /opt/quill
ENV PATH=/opt/quill/bin:$PATH PYTHONUNBUFFERED=1 QUILL_HEALTH="--ca /srv/quill/ca.crt"
USER 10001
EXPOSE 50051 50052 50053
STOPSIGNAL SIGTERM
# The health service of gRPC, as grpc_health_probe asks it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=6 \
    CMD ["sh", "-c", "quill health --address localhost:50051 $QUILL_HEALTH"]
ENTRYPOINT ["quill", "serve"]
CMD ["/srv/quill/bundle", "--host", "0.0.0.0", "--log-format", "json", \
     "--tls-cert", "/srv/quill/tls.crt", "--tls-key", "/srv/quill/tls.key", \
     "--api-keys", "/srv/quill/keys.json"]

# The same with CUDA 13 and cuDNN 9 beside the runtime; the host brings the driver. The runtime's
# own extras choose these libraries, so they aren't pinned by hash.
FROM cpu AS cuda
USER 0
RUN /opt/quill/bin/pip install --no-cache-dir "onnxruntime-gpu[cuda,cudnn]==1.31.1"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001

# With Ray, for `quill cluster config --ray-service`: docker build --target cluster -t quill-cluster:0.1.0 .
# KubeRay gives the command. constraints-cluster.txt pins versions without hashes.
FROM build AS build-cluster
COPY constraints.txt constraints-cluster.txt ./
RUN PIP_CONSTRAINT="constraints.txt constraints-cluster.txt" \
    /opt/quill/bin/pip install --no-cache-dir ".[cluster,tracing]"

FROM cpu AS cluster
USER 0
COPY --from=build-cluster /opt/quill /opt/quill
RUN install --directory --owner 10001 --group 10001 /home/quill
ENV HOME=/home/quill
USER 10001
HEALTHCHECK NONE
ENTRYPOINT []
CMD ["bash"]
