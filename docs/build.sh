#!/usr/bin/env bash
# The documents as a site: installs what is missing and writes build/site/index.html, or to the folder given. Nothing
# is compiled: docstrings are read from the sources. A warning, such as a link that leads nowhere, is an error.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup_env.sh"
cd "$repository"
site=$(realpath -m "${1:-build/site}")

install_debian_packages doxygen python3-venv
install_python_packages
[[ -x $FARANDOLE_VENV/bin/sphinx-build ]] ||
  quietly "$python" -m pip install --disable-pip-version-check "${docs_packages[@]}"
mkdir -p "$site.xml"
doxygen - < <(cat docs/Doxyfile && echo "OUTPUT_DIRECTORY = $site.xml")
"$python" -m sphinx -q -E -W --keep-going -b html -d "$site.xml/doctrees" \
  -D "breathe_projects.farandole=$site.xml/xml" docs "$site"
say "the site is in $site/index.html"
