#!/usr/bin/env bash
# From a fresh machine to a trained model: installs what is missing, builds, trains a small network
# on Fashion-MNIST on 2 ranks, and ends with one line of results. Arguments go to fashion_mnist.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

set_up
install_package

cd "$repository"
exec mpirun --oversubscribe -np 2 "$python" examples/fashion_mnist.py --epochs 2 "$@"
