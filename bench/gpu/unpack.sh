#!/usr/bin/env bash
# unpack.sh PARTS_DIR FLASHINFER_WHEEL EXTRA_DIR: lay out the carried payload under /tmp.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p /tmp/site /tmp/flashinfer /tmp/extra /tmp/model /tmp/model-dsa /tmp/model-nextn
cat "$1"/site.tar.xz.* | tar -xJ -C /tmp/site
python3 -m zipfile -e "$2" /tmp/flashinfer
for wheel in "$3"/*.whl; do python3 -m zipfile -e "$wheel" /tmp/extra; done
cp "$here/models/glm5_like.json" /tmp/model/config.json
cp "$here/models/glm5_like_nextn.json" /tmp/model-nextn/config.json
cp "$here/models/glm_dsa.json" /tmp/model-dsa/config.json
echo "unpacked: sglang at /tmp/site/sglang"
