#!/usr/bin/env bash
# Installs Chromium on Debian, for the tests of the server's page. As root.
set -euo pipefail
command -v chromium >/dev/null && exit 0
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium
