#!/bin/bash
# container.sh CHECKOUT MEGABYTES yes|no COMMAND...: run a command in the checkout as a small container does, as the user
# nobody, on one core, with so much of /dev/shm; the checkout is read-only, and runs/ in it can be written to, or not.
# Needs root. Nothing of it is seen outside.
set -e
if [ -z "$IN_CONTAINER" ]; then
    IN_CONTAINER=1 PREFIX=$("$1/.venv/bin/python" -c 'import sys; print(sys.base_prefix)') exec unshare --mount "$0" "$@"
fi
checkout=$1 megabytes=$2 writable=$3
shift 3
case $PREFIX in
    /root/*) # which nobody may enter: an empty /root that holds Python only
        mkdir /dev/shm/python.$$
        mount --bind "$PREFIX" /dev/shm/python.$$
        mount -t tmpfs -o mode=755 tmpfs /root
        mkdir -p "$PREFIX"
        mount --move /dev/shm/python.$$ "$PREFIX"
        rmdir /dev/shm/python.$$
        ;;
esac
mount -t tmpfs -o "size=${megabytes}m,mode=1777" tmpfs /dev/shm
mkdir -p "$checkout/runs"
mount --bind "$checkout" "$checkout"
[ "$writable" = no ] || mount -t tmpfs -o mode=1777 tmpfs "$checkout/runs"
mount -o remount,bind,ro "$checkout"
cd "$checkout"
exec taskset -c 0 setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/nonexistent "$@"
