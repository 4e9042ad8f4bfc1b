# The server on CPU; for an NVIDIA GPU see docs/serving.md:
#   docker build -t twinreel --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
FROM python:3.11-slim-bookworm

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE

RUN useradd --system --uid 10001 --create-home twinreel \
    && install -d -o twinreel -g twinreel -m 0700 /data

WORKDIR /opt/twinreel
COPY constraints.txt pyproject.toml README.md LICENSE ./
# torch alone first: it is by far the largest layer and changes least
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY src ./src
RUN pip install -c constraints.txt '.[serve]'

USER 10001
VOLUME /data
EXPOSE 8188
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8188/health', timeout=4)"]
# The key is a secret of the container: docker run -v ./key.txt:/run/secrets/twinreel-key:ro ...
ENTRYPOINT ["twinreel", "serve", "--host", "0.0.0.0", "--data", "/data", "--api-key-file", "/run/secrets/twinreel-key"]
