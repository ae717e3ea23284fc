#!/bin/sh
# Install Debian packages whose program is missing: `install_system.sh PROGRAM=PACKAGE …`. Does nothing where all programs are
# there, and asks nothing. Never fails: what needs a program that is not there says so itself.
packages=""
for pair in "$@"; do
    command -v "${pair%%=*}" >/dev/null || packages="$packages ${pair#*=}"
done
[ -z "$packages" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive  # some packages would ask for a time zone
    # shellcheck disable=SC2086 - one word per package
    apt-get update -q && apt-get install -y -q --no-install-recommends $packages && exit 0
fi
echo "missing:$packages; install with your system's packages"
exit 0
