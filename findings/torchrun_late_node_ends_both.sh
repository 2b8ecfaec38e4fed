#!/usr/bin/env bash
# torch 2.13.0 (CPU).
#
# Expected: `torchrun --nnodes 1:2` starts with one node, and when a second one comes, all workers are started again as
#   a world of two, as its documentation says of elastic jobs.
# Seen: the first agent stops its worker for the second one's sake; then each of the two waits in its store for what
#   the other is to write, and after 60 s both end with DistStoreError. Nothing trains any more.
# Output seen: up 0 of 1; exit codes 1 and 1; DistStoreError in both logs
# Farandole: farandolerun --elastic takes late hosts in, and a rank that cannot join leaves the others as they are.
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

cd "$folder"
cat >worker.py <<'PYTHON'
import os
import time

print("up", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
time.sleep(10 if os.environ["WORLD_SIZE"] == "2" else 300)
PYTHON
port=$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
agent() {
  timeout 280 python -m torch.distributed.run --nnodes=1:2 --nproc-per-node=1 --rdzv-id=late --rdzv-backend=c10d \
    --rdzv-endpoint="127.0.0.1:$port" --rdzv-conf=last_call_timeout=3 worker.py
}
agent >first 2>&1 &
for _ in $(seq 100); do grep -q "up 0 of 1" first && break || sleep 1; done
codes=()
agent >second 2>&1 && codes+=(0) || codes+=($?)
wait $! && codes+=(0) || codes+=($?)
grep -h "^up" first second || true
echo "exit codes ${codes[*]}"
grep -l DistStoreError first second
[[ ${codes[*]} == "1 1" ]] && ! grep -q "of 2" first second && grep -q DistStoreError first && grep -q DistStoreError second
