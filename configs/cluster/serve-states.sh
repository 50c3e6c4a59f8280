#!/bin/bash
# Serve the states of a target to `--teacher`, from all GPUs that are visible: a vLLM on each of them, at port 8000 and the
# ports after it. GPUS=2 gives each vLLM two GPUs.
#   GPUS=2 configs/cluster/serve-states.sh Qwen/Qwen3.6-27B-FP8 '[2, 32, 61, 64]' --max-model-len 4096
# The numbers are the layers after which training reads states, the last one included: `draftsmith plan --teacher`
# prints them. What follows them is for vllm serve. VLLM_API_KEY sets the key that clients must have. On a machine without
# a GPU one server of vLLM's CPU build is started.
set -euo pipefail

target=$1 layers=$2
shift 2
gpus=${GPUS:-1} port=${PORT:-8000} folder=${STATES:-/dev/shm/states}
visible=${CUDA_VISIBLE_DEVICES:-$( (nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || echo 0) | paste -sd,)}
IFS=, read -ra devices <<<"$visible"
if ((gpus < 1 || gpus > ${#devices[@]})); then
    echo "error: GPUS: expected 1 to ${#devices[@]}, which are visible, found $gpus" >&2
    exit 2
fi
module=draftsmith.scripts.services.target_states

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for ((first = 0; first + gpus <= ${#devices[@]}; first += gpus, port += 1)); do
    mkdir -p "$folder/$port"
    CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${devices[*]:first:gpus}") vllm serve "$target" --port "$port" \
        --tensor-parallel-size "$gpus" --middleware "$module.StatesMiddleware" \
        --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": '"$layers"'}}}' \
        --kv-transfer-config '{"kv_connector": "StatesConnector", "kv_connector_module_path": "'$module'",
            "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": "'"$folder/$port"'"}}' \
        "$@" &
done
wait # one that ends leaves its work to the others
