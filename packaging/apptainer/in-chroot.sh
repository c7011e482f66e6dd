#!/bin/bash
# Run %post and %test of a definition without Apptainer, in a root folder that debootstrap makes. It needs root.
#
#   packaging/apptainer/in-chroot.sh DEFINITION ROOT [post] [test] [exec COMMAND...]
#
# Without a third word it runs post and test. `exec` runs a command as `apptainer exec` does, with %environment, but
# in /tmp instead of the calling folder; under mpirun it is one rank. BIND="FOLDER:/opt/host-mpi" mounts a folder, as --bind does.
# Variables such as PIP_FIND_LINKS are passed on.
set -eu
definition=$(realpath "$1") root=$2
shift 2
[ $# -gt 0 ] || set -- post test

# section NAME: its lines, with the arguments filled in
section() {
    awk -v want="%$1" '/^%/ { inside = ($1 == want); next } inside' "$definition" |
        sed "s/{{ extras }}/${EXTRAS:-$(sed -n 's/^    extras=//p' "$definition")}/"
}

# inside COMMAND...: in the root, with the host's /proc, /dev and /sys, in a mount namespace that ends with the command
inside() {
    ROOT=$root exec unshare --mount bash -c '
        for folder in proc dev sys; do mount --rbind "/$folder" "$ROOT/$folder"; done
        for pair in ${BIND:-}; do mkdir -p "$ROOT/${pair#*:}"; mount --bind "${pair%%:*}" "$ROOT/${pair#*:}"; done
        exec chroot "$ROOT" "$@"' bash "$@"
}

if [ "$1" = exec ]; then
    shift
    inside /bin/bash -c "cd /tmp; $(section environment)
        exec \"\$@\"" bash "$@"
fi
[ -e "$root/bin/sh" ] || debootstrap --variant=minbase bookworm "$root"
for part in "$@"; do
    if [ "$part" = post ]; then
        cp /etc/resolv.conf "$root/etc/"
        section files | while read -r from to; do
            [ -n "$from" ] || continue
            case $to in */) mkdir -p "$root/$to" ;; *) mkdir -p "$root/$(dirname "$to")" ;; esac
            # shellcheck disable=SC2086 # a pattern
            cp $from "$root/$to"
        done
        (inside /bin/sh -c "$(section post)")
    else
        (inside /bin/sh -c "$(section environment)
$(section test)")
    fi
    echo "in-chroot: %$part of ${definition##*/} ended with status 0"
done
