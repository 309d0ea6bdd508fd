#!/bin/sh
# Install Debian/Ubuntu packages, named as arguments, where this user may; otherwise name them and succeed:
# the tests that need them are then skipped, or fail under CI=true.
#
# The services that such packages bring are neither started now nor enabled for the next boot: the tests start
# servers of their own.
set -eu
[ $# -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    as_root=cannot
fi
if [ "$as_root" = cannot ] || ! command -v apt-get >/dev/null; then
    echo "packages: not allowed to install, or no apt-get here; please install: $*" >&2
    exit 0
fi

$as_root sh -s -- "$@" <<'ROOT'
set -u
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
apt-get update -qq || echo "packages: apt-get update failed; trying with the lists at hand" >&2
for package in "$@"; do
    # One at a time: a package that this release does not have must not keep the others away.
    if ! apt-get install -qq -y --no-install-recommends "$package" </dev/null >/dev/null; then
        echo "packages: could not install $package" >&2
    elif [ -d /run/systemd/system ]; then
        for unit in $(dpkg -L "$package" | sed -n 's|^\(/usr\)\?/lib/systemd/system/\([^@]*\.service\)$|\2|p'); do
            systemctl disable --quiet "$unit" || echo "packages: could not disable $unit" >&2
        done
    fi
done
ROOT
