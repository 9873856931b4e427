# The CPU environment of `make test`. Not built by the tests: they run in .venv.
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY . .
RUN make .venv/installed
CMD ["make", "train"]
