#!/usr/bin/env bash
# run_tp8_cds16.sh [SERVER ARGS...]: GLM-5-NVFP4 on eight GPUs, FP8 KV, flashinfer attention, chunked prefill size 16.
#
#   MODEL_PATH=/models/GLM-5-NVFP4 scripts/run_tp8_cds16.sh
#   mlapatch launch --name stock                      # the same, with preflight, watching and diagnosis
#
# Each setting is an environment variable with this default; arguments are passed on to the server and come last, so
# they win:
#   MODEL_PATH            (required)           folder with config.json and the weights, or a Hugging Face name
#   TP_SIZE               8                    GPUs
#   CHUNKED_PREFILL_SIZE  16                   rounded up to the page size that the server will use, see below
#   KV_CACHE_DTYPE        fp8_e4m3
#   ATTENTION_BACKEND     flashinfer
#   MOE_RUNNER_BACKEND    flashinfer_cutlass
#   MEM_FRACTION_STATIC   0.92
#   HOST, PORT            127.0.0.1, 8000
#   DSA_BACKEND           trtllm               both NSA/DSA backend flags, see below; empty: pass neither
#   NUM_CONTINUOUS_DECODE_STEPS (unset)        passed when set: the other reading of "cds" in this script's name
#   PYTHON                python3              the interpreter that has SGLang
#   MLAPATCH_DRY_RUN      (unset)              1: print the command, one argument a line, and start nothing
#
# Chunked prefill size. SGLang asserts that it is a multiple of the page size, and gives DSA models (GLM-5,
# DeepSeek-V3.2) pages of 64 tokens, so 16 becomes 64 there. So small a chunk bounds the activations and how long a
# prompt delays running decodes, and that is all it is good for: a prompt is prefilled 64 tokens a forward pass, each of
# which reads all weights and the whole prefix. A prompt of 131,072 tokens takes 2,048 passes instead of 16 at
# CHUNKED_PREFILL_SIZE=8192, and with stock flashinfer MLA every pass with a prefix casts the whole FP8 pool once a layer
# as well. For long prompts set CHUNKED_PREFILL_SIZE=4096 or more.
#
# NSA/DSA backends. With --attention-backend flashinfer a DSA model does not use them to attend, yet they decide how its
# KV pool is laid out. Their defaults for FP8 KV give packed rows of 656 bytes, which the flashinfer backend reads as
# plain rows of 576: no error, wrong answers. `trtllm` in both gives plain rows; in only one, a prefix hit of 8,192
# tokens or more ends the server. Older releases (0.5.9) spell the flags --nsa-*, newer ones (0.5.15.post1, 0.5.23)
# --dsa-*: the spelling that the installed release declares is passed.
set -euo pipefail

if [[ -z "${MODEL_PATH:-}" ]]; then
  echo "run_tp8_cds16.sh: MODEL_PATH is not set. Example: MODEL_PATH=/models/GLM-5-NVFP4 $0" >&2
  exit 2
fi
TP_SIZE=${TP_SIZE:-8}
CHUNKED_PREFILL_SIZE=${CHUNKED_PREFILL_SIZE:-16}
KV_CACHE_DTYPE=${KV_CACHE_DTYPE:-fp8_e4m3}
ATTENTION_BACKEND=${ATTENTION_BACKEND:-flashinfer}
MOE_RUNNER_BACKEND=${MOE_RUNNER_BACKEND:-flashinfer_cutlass}
MEM_FRACTION_STATIC=${MEM_FRACTION_STATIC:-0.92}
HOST=${HOST:-127.0.0.1}
PORT=${PORT:-8000}
DSA_BACKEND=${DSA_BACKEND-trtllm}
PYTHON=${PYTHON:-python3}
if [[ ! "$CHUNKED_PREFILL_SIZE" =~ ^(-?)0*([0-9]{1,9})$ ]]; then
  echo "run_tp8_cds16.sh: CHUNKED_PREFILL_SIZE needs a whole number of at most nine digits, found $CHUNKED_PREFILL_SIZE. Example: CHUNKED_PREFILL_SIZE=8192" >&2
  exit 2
fi
asked_chunk=$((${BASH_REMATCH[1]}10#${BASH_REMATCH[2]})) # 10#: bash reads 0100 as 64, Python and SGLang as 100

asked_page_size=
for ((at = 1; at <= $#; at++)); do
  following=$((at + 1))
  case "${!at}" in
    --page-size) value=${!following:-} ;;
    --page-size=*) value=${!at#*=} ;;
    *) continue ;;
  esac
  if [[ ! "$value" =~ ^[1-9][0-9]{0,5}$ ]]; then
    echo "run_tp8_cds16.sh: --page-size needs a whole number from 1 to 999999, found ${value:-no value}. Example: --page-size 64" >&2
    exit 2
  fi
  asked_page_size=$value
done

# Two facts that need Python but not SGLang's imports: "page_size flag_prefix", for instance "64 nsa". What they say of a
# config is what mlapatch's model_config.py and model_fit.py say of it. Exit 5: it has said itself what is wrong.
status=0
facts=$(
  "$PYTHON" - "$MODEL_PATH" "$ATTENTION_BACKEND" "$asked_page_size" <<'PY'
import importlib.util
import json
import pathlib
import sys

model, attention, asked = sys.argv[1:]
forced = {"flashmla": 64, "trtllm_mla": 64, "cutlass_mla": 128}
page = forced.get(attention) or int(asked or 1)
try:
    config = json.loads((pathlib.Path(model) / "config.json").read_bytes())
    if not isinstance(config, dict):
        raise ValueError(f"an object is needed, found {type(config).__name__}")
except (ValueError, RecursionError) as error:
    found = "nested too deeply" if isinstance(error, RecursionError) else error
    print(f"run_tp8_cds16.sh: {model}/config.json is no JSON: {found}", file=sys.stderr)
    sys.exit(5)
except OSError:
    print(f"run_tp8_cds16.sh: no {model}/config.json here; taking it for a DSA model (pages of 64)", file=sys.stderr)
    config = {"index_topk": 1}
inner = config.get("text_config")
own = isinstance(inner, dict) and ("kv_lora_rank" in inner or "kv_lora_rank" not in config)
text = inner if own else config
if text.get("index_topk") is not None:
    pool = text.get("index_kpool")
    page = 64 * (pool if type(pool) is int and 0 < pool < 1 << 24 else 1)

spelling = "none"
spec = importlib.util.find_spec("sglang")
for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
    files = [pathlib.Path(root, "srt/server_args.py"), *pathlib.Path(root, "srt/arg_groups").rglob("*.py")]
    text = "".join(file.read_text(errors="replace") for file in files if file.is_file())
    spelling = "dsa" if "dsa_prefill_backend" in text else "nsa" if "nsa_prefill_backend" in text else "none"
print(page, spelling)
PY
) || status=$?
if ((status == 5)); then
  exit 5
fi
if ((status != 0)) || [[ ! "${facts##*$'\n'}" =~ ^([1-9][0-9]*)\ (dsa|nsa|none)$ ]]; then # a site may print before it
  echo "run_tp8_cds16.sh: $PYTHON did not say the page size and SGLang's flags: set PYTHON to the interpreter that has SGLang" >&2
  exit 5
fi
page_size=${BASH_REMATCH[1]}
dsa_prefix=${BASH_REMATCH[2]}

chunk=$asked_chunk # -1 switches chunking off and stays as it is
if ((chunk > 0)); then
  chunk=$(((chunk + page_size - 1) / page_size * page_size))
fi
if ((chunk != asked_chunk)); then
  echo "run_tp8_cds16.sh: chunked prefill size $asked_chunk -> $chunk: SGLang wants a multiple of its page size, $page_size here" >&2
fi
if ((chunk > 0 && chunk < 1024)); then
  echo "run_tp8_cds16.sh: prompts are prefilled $chunk tokens a pass ($((131072 / chunk)) passes for 131072); set CHUNKED_PREFILL_SIZE=8192 for long prompts" >&2
fi

command=(
  "$PYTHON" -m sglang.launch_server
  --model-path "$MODEL_PATH"
  --tp-size "$TP_SIZE"
  --chunked-prefill-size "$chunk"
  --kv-cache-dtype "$KV_CACHE_DTYPE"
  --attention-backend "$ATTENTION_BACKEND"
  --moe-runner-backend "$MOE_RUNNER_BACKEND"
  --mem-fraction-static "$MEM_FRACTION_STATIC"
  --host "$HOST"
  --port "$PORT"
)
if [[ -n "$DSA_BACKEND" && "$dsa_prefix" != none ]]; then
  command+=("--$dsa_prefix-prefill-backend" "$DSA_BACKEND" "--$dsa_prefix-decode-backend" "$DSA_BACKEND")
fi
if [[ -n "${NUM_CONTINUOUS_DECODE_STEPS:-}" ]]; then
  command+=(--num-continuous-decode-steps "$NUM_CONTINUOUS_DECODE_STEPS")
fi
command+=("$@")

if [[ "${MLAPATCH_DRY_RUN:-}" == 1 ]]; then
  printf '%s\n' "${command[@]}"
  exit 0
fi
exec "${command[@]}"
