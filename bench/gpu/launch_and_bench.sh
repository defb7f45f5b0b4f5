#!/usr/bin/env bash
# launch_and_bench.sh OUT: a real start and real failing ones through `mlapatch launch`, then `mlapatch bench` next to
# sglang.bench_serving on the same server. Needs the payload (README.md).
set -uo pipefail
out=$1
site=/tmp/site-active-cast
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out/launch" /tmp/model-tok
cp /tmp/model/config.json /tmp/model-tok/
python3 "$here/bench/gpu/make_tokenizer.py" /tmp/model-tok
export PYTHONPATH=$here/src:$site:/tmp/extra:/tmp/site:/tmp/site/nvidia_cutlass_dsl/python_packages
export FLASHINFER_DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1 MLAPATCH_SGLANG=$site
cd /tmp || exit 1
rm -rf "$site" && mkdir "$site" && cp -r /tmp/site/sglang /tmp/site/sglang-*.dist-info "$site"
python3 -m mlapatch apply active-cast
# The payload leaves tests and other parts of the wheel out: that is an edit like any other, so it is recorded as known.
PIP_RETRIES=0 PIP_TIMEOUT=2 timeout 60 python3 -m mlapatch guard record > "$out/guard_record.txt" 2>&1
echo "guard record exited $?"
common=(python3 -m sglang.launch_server --model-path /tmp/model-tok --load-format dummy --attention-backend flashinfer
  --kv-cache-dtype fp8_e4m3 --max-total-tokens 495552 --grammar-backend none --sampling-backend pytorch --host 127.0.0.1
  --cuda-graph-max-bs 16 --context-length 200000)
echo "== a start"
time timeout 150 python3 -m mlapatch launch --name active-cast --detach --logs "$out/launch" --command -- \
  "${common[@]}" --port 30011 --page-size 1 --chunked-prefill-size 8192
echo "launch exited $?"
echo "== the port is taken"
timeout 40 python3 -m mlapatch launch --name port-taken --logs "$out/launch" --command -- \
  "${common[@]}" --port 30011 --page-size 1 --chunked-prefill-size 8192
echo "launch exited $?"
echo "== bench, twice"
python3 -m sglang.bench_serving --backend sglang --host 127.0.0.1 --port 30011 --dataset-name random-ids \
  --random-input-len 512 --random-output-len 128 --random-range-ratio 1 --num-prompts 6 --max-concurrency 1 \
  --tokenize-prompt --tokenizer /tmp/model-tok --model /tmp/model-tok --seed 1 --output-file "$out/bench_serving.jsonl" > "$out/bench_serving.txt" 2>&1
grep -E "TPOT|ITL|TTFT" "$out/bench_serving.txt" || tail -5 "$out/bench_serving.txt"
python3 -m mlapatch bench --url http://127.0.0.1:30011 -i 512 -o 128 -c 1 -r 6 --no-keep --json > "$out/bench_mlapatch.json"
python3 - "$out/bench_mlapatch.json" <<'PY'
import json, sys
result = json.load(open(sys.argv[1]))
print(json.dumps(result.get("cases", result), indent=None)[:900])
PY
python3 -m mlapatch stop active-cast --logs "$out/launch"
echo "stop exited $?"
echo "== a wrong page size"
timeout 90 python3 -m mlapatch launch --name wrong-page --logs "$out/launch" --force --command -- \
  "${common[@]}" --port 30011 --page-size 64 --chunked-prefill-size 16
echo "launch exited $?"
ls -la "$out/launch"
