"""Who is served, when: gRPC, continuous batching, sampling, text. Never imports torch or model."""

import privacy as privacy
