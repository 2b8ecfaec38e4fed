#!/usr/bin/env bash
# glibc (seen: 2.36 of Debian 12), by Python 3.11's socket.getaddrinfo, which hands its code on; no package.
#
# Expected: a process that has used up its descriptors gets EAI_SYSTEM with EMFILE ("Too many open files").
# Seen: in the first look-up of a process EAI_NONAME, "Name or service not known", even for localhost, which stands in
#   /etc/hosts: a rank that opens many connections before it looks up the next host blames the name, or DNS, for its own
#   limit (ulimit -n). Once a look-up has gone well, the same lack gives EMFILE.
# Output seen: first: [Errno -2] Name or service not known; later: [Errno 24] Too many open files
set -euo pipefail
"${PYTHON:-python3}" - <<'PYTHON'
import encodings.idna, os, platform, resource, socket  # the codec of names would need a descriptor later

def look_up() -> object:
    try:
        return socket.getaddrinfo("localhost", 80) and "found"
    except OSError as error:  # gaierror is one
        return error

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
free = os.dup(2)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # no further one
first = look_up()
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 64, hard))
print(platform.libc_ver(), "first look-up, without descriptors:", first)
assert isinstance(first, socket.gaierror) and first.errno == socket.EAI_NONAME, first
with_some = look_up()
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
later = look_up()
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 64, hard))
print("with descriptors:", with_some, "and without again:", later)
assert with_some == "found" and not isinstance(later, socket.gaierror) and later.errno == 24, later
PYTHON
