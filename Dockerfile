# Both services: `docker build --target orders-service .` and `--target fulfillment-service .` share
# every layer but the last one. No BuildKit-only syntax, so that any engine builds it.

FROM rust:1.95-slim-trixie AS build
WORKDIR /build

# The dependencies first, against empty sources: this layer, most of the build, is made again only
# when a manifest or the lock file changes. The package in tests/ must be there, because it is in
# the workspace, but nothing of it is built.
COPY Cargo.toml Cargo.lock ./
COPY .cargo .cargo
COPY shared/Cargo.toml shared/
COPY orders-service/Cargo.toml orders-service/
COPY fulfillment-service/Cargo.toml fulfillment-service/
COPY tests/Cargo.toml tests/
RUN mkdir -p tests/harness tests/dev tests/cases \
    && touch tests/harness/lib.rs tests/dev/main.rs tests/cases/main.rs \
    && for package in shared orders-service fulfillment-service; do \
        mkdir $package/src && touch $package/src/lib.rs; \
    done \
    && echo 'fn main() {}' | tee orders-service/src/main.rs > fulfillment-service/src/main.rs \
    && cargo build --release --locked --package orders-service --package fulfillment-service \
    # Cargo compares times, and the real sources may well be older than what was just built.
    && cargo clean --release --package shared --package orders-service --package fulfillment-service

COPY .sqlx .sqlx
COPY migrations migrations
COPY shared shared
COPY orders-service orders-service
COPY fulfillment-service fulfillment-service
RUN cargo build --release --locked --package orders-service --package fulfillment-service

# The same Debian as above: a program needs the C library it was linked with, or a newer one.
FROM debian:trixie-slim AS runtime
LABEL org.opencontainers.image.licenses="MIT OR Apache-2.0"
# Nobody in particular; a number, so that Kubernetes' runAsNonRoot can tell that it is not root.
USER 65532:65532
WORKDIR /
# In a container, others reach the service by its address.
ENV HTTP_ADDR=0.0.0.0:8080
EXPOSE 8080

FROM runtime AS orders-service
LABEL org.opencontainers.image.title="orders-service" \
    org.opencontainers.image.description="Takes orders, confirms payments, and writes the event in the same transaction"
COPY --from=build /build/target/release/orders-service /usr/local/bin/
# Longer than the healthcheck's own limit of 8 s.
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=3 CMD ["orders-service", "healthcheck"]
ENTRYPOINT ["orders-service"]

FROM runtime AS fulfillment-service
LABEL org.opencontainers.image.title="fulfillment-service" \
    org.opencontainers.image.description="Turns each confirmed payment into one dispatch, however often it is told"
COPY --from=build /build/target/release/fulfillment-service /usr/local/bin/
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=3 CMD ["fulfillment-service", "healthcheck"]
ENTRYPOINT ["fulfillment-service"]
