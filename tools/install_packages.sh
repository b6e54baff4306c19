#!/usr/bin/env bash
# install_packages.sh "PROGRAMS" PACKAGES...: installs packages of the distribution where none of the programs is there.
# Never fails: without them, the tests that require them are skipped by name.
set -uo pipefail

PATH=$PATH:/usr/sbin
for name in $1; do
  if command -v "$name" > /dev/null; then exit 0; fi
done
shift
packages=("$@")
skipped() {
  echo "$1. Tests that require ${packages[*]} are skipped; to run them: apt-get install ${packages[*]}" >&2
  exit 0
}
command -v apt-get > /dev/null || skipped "There is no apt-get here"
as_root=()
if [ "$(id -u)" != 0 ]; then
  as_root=(sudo --non-interactive)
  command -v sudo > /dev/null && sudo --non-interactive true 2> /dev/null || skipped "Installing requires root"
fi
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install --quiet=2 --yes --no-install-recommends)
"${as_root[@]}" "${install[@]}" "${packages[@]}" 2> /dev/null && exit 0  # the lists of packages may be there
"${as_root[@]}" apt-get update --quiet=2 || skipped "apt-get update failed"
"${as_root[@]}" "${install[@]}" "${packages[@]}" || skipped "apt-get install failed"
