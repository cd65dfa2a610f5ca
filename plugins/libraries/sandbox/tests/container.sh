#!/bin/sh
# Stands in for `docker run`, where there is no daemon: a container by unshare, as far as the tests need one.
# docker run OPTIONS --mount type=bind,src=SOURCE,dst=... --entrypoint PYTHON IMAGE ARGUMENTS
while [ "$1" != --entrypoint ]; do
    case "$1" in
    type=bind,*) source=${1#type=bind,src=} && source=${source%%,*} ;;
    esac
    shift
done
python=$2
shift 3
export source python
exec unshare --user --map-root-user --pid --fork --mount --net --ipc --kill-child sh -c '
PATH=$PATH:/usr/sbin:/sbin  # of chroot
set -e
mount -t tmpfs root /mnt
for folder in usr bin lib lib64 dev; do
    [ -e /$folder ] || continue
    mkdir /mnt/$folder
    mount --rbind /$folder /mnt/$folder
done
mkdir -p /mnt/box /mnt/tmp /mnt/proc /mnt/supervisor/whet_sandbox
mount -t proc proc /mnt/proc
mount -t tmpfs -o size=9m box /mnt/box
mount --bind "$source" /mnt/supervisor/whet_sandbox
exec chroot /mnt "$python" "$@"' sh "$@"
