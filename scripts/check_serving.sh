#!/usr/bin/env bash
# Checks `vla-rl serve` with the clients of others, and evaluation of the servers of others: openpi's client and
# vla-eval's harness play LIBERO against a served checkpoint, on fast LIBERO; openpi's server is evaluated by `vla-rl eval`.
# Minutes on two cores; needs a package index. LIBERO has placeholder assets, on which the checkpoint was trained.
#   bash scripts/check_serving.sh [FOLDER]     EPISODES=4 of each client; PORT=8765
# What is not the clients' runs in this project's own environment, .venv or $VLA_RL_PYTHON. The clients' packages go into
# FOLDER (default: a new temporary one), which is left.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ours=${VLA_RL_PYTHON:-.venv/bin/python}
folder=$(realpath -m "${1:-$(mktemp -d -t vla_rl-serving-XXXX)}")
port=${PORT:-8765} episodes=${EPISODES:-4}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
rm -rf "${folder:?}/peers"
# --no-deps: openpi-client asks for numpy below 2, which it does not need; the rest is in requirements.txt
"$ours" -m pip install --quiet --no-deps --target "$folder/peers" \
    openpi-client==0.1.2 openpi-server==0.1.0 vla-eval==0.8.0 lazyregistry==0.4.0
export PYTHONPATH=$PWD:$folder/peers:${PYTHONPATH:-}

start() { # LOG COMMAND...: a server in the background, until it listens
    local log=$1
    shift
    "$@" >"$log" 2>&1 &
    server=$!
    trap 'kill $server 2>/dev/null || true' EXIT
    for _ in $(seq 300); do
        grep -q listening "$log" && return
        kill -0 $server 2>/dev/null || break
        sleep 1
    done
    cat "$log"
    exit 1
}
stop() {
    kill -INT $server
    wait $server
}
vla_rl() { "$ours" -m vla_rl.commands.cli "$@"; }

echo "== vla-rl serve checkpoints/libero_spatial_task0"
start "$folder/serve.log" "$ours" -m vla_rl.commands.cli serve checkpoints/libero_spatial_task0 libero_ppo --port "$port"
tail -n 2 "$folder/serve.log"
for client in openpi vla_eval; do
    echo "== $client plays LIBERO"
    "$ours" scripts/serving_peers.py $client "ws://127.0.0.1:$port" --episodes "$episodes" 2>"$folder/$client.log"
done
echo "== vla-rl eval of the served policy, and of the checkpoint itself"
small=(--config libero_ppo --episodes "$episodes" env.assets=placeholder placement.env_workers=1)
vla_rl eval policy=remote "policy.address=ws://127.0.0.1:$port" "${small[@]}" | grep success
vla_rl eval checkpoints/libero_spatial_task0 "${small[@]}" | grep success
stop
echo "== openpi's server, with a policy that moves up, evaluated by vla-rl eval"
start "$folder/openpi_server.log" "$ours" scripts/serving_peers.py server "ws://127.0.0.1:$port"
vla_rl eval policy=remote "policy.address=ws://127.0.0.1:$port" env.wrist_camera=true "${small[@]}" \
    env.max_episode_steps=40 | grep success
kill $server
echo "all of it works: $folder"
