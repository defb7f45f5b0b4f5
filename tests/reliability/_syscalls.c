/* Faults at system calls, for LD_PRELOAD: every call that changes something below one folder is counted, and may be
 * recorded; at the n-th one the process dies, or the call fails. tests/reliability/_syscalls.py builds and arms it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, SYNC = 4, RENAME = 8, UNLINK = 16, MKDIR = 32, CHMOD = 64, LINK = 128, LOCK = 256,
       CLOSE = 512, TRUNCATE = 1024 };
enum { COUNT = 0, KILL = 1, ONCE = 2, EVER = 3, SHORT = 4, TORN = 5 };

static char folder[PATH_MAX];
static size_t folder_length;
static long at, seen;
static int mode, number, mask, record = -1, armed;

void fault_arm(const char *below, int calls, int how, long nth, int error, int descriptor) {
    snprintf(folder, sizeof folder, "%s/", below);
    folder_length = strlen(folder);
    mask = calls, mode = how, at = nth, number = error, record = descriptor, seen = 0, armed = 1;
}
long fault_count(void) { return seen; }
void fault_disarm(void) { armed = 0; }

static int inside(const char *path) {
    return !strncmp(path, folder, folder_length) || (strlen(path) + 1 == folder_length && !strncmp(path, folder, folder_length - 1));
}

/* The absolute form of a path, as far as it matters here. */
static const char *absolute(int dir, const char *path, char *out) {
    char base[PATH_MAX], link[64];
    if (path[0] == '/') return path;
    if (dir == AT_FDCWD) {
        if (syscall(SYS_getcwd, base, sizeof base) < 0) return path;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        ssize_t n = readlink(link, base, sizeof base - 1);
        if (n < 0) return path;
        base[n] = 0;
    }
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return path;
    return out;
}

static int name_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) return 0;
    out[n] = 0;
    return inside(out);
}

/* Header: operation, path, second path, offset, length, with \x1f between them and \n at the end; then the data. */
static void note(const char *what, const char *one, const char *two, long long offset, const void *data, size_t size) {
    if (record < 0) return;
    char head[2 * PATH_MAX + 128];
    int n = snprintf(head, sizeof head, "%s\x1f%s\x1f%s\x1f%lld\x1f%zu\n", what, one, two, offset, size);
    if (syscall(SYS_write, record, head, n) < 0 || (size && syscall(SYS_write, record, data, size) < 0)) abort();
}

/* 0: go on; 1: fail with errno set. `room` is set for writes that are to be cut short. */
static int fault(int call, int *cut) {
    if (cut) *cut = 0;
    if (!armed || !(mask & call)) return 0;
    seen++;
    if (mode == COUNT || seen < at) return 0;
    if (seen > at && mode != EVER) return 0;
    switch (mode) {
    case KILL: syscall(SYS_kill, getpid(), SIGKILL); return 1;
    case SHORT: case TORN: if (cut) *cut = 1; return 0;
    default:
        if (cut && mode == EVER && number == ENOSPC && seen == at) { *cut = 2; return 0; } /* a disk fills up in the middle */
        errno = number;
        return 1;
    }
}

static int open_any(int dir, const char *path, int flags, mode_t permissions) {
    char buffer[PATH_MAX];
    const char *full = path;
    int writes = flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC), watched = 0, fresh = 0;
    if (armed && writes && !(flags & O_DIRECTORY)) {
        full = absolute(dir, path, buffer);
        watched = inside(full);
    }
    if (watched) {
        if (fault(OPEN, NULL)) return -1;
        fresh = access(full, F_OK) != 0;
    }
    int fd = syscall(SYS_openat, dir, path, flags, permissions);
    if (watched && fd >= 0 && (fresh || (flags & O_TRUNC))) note(fresh ? "create" : "empty", full, "", 0, NULL, 0);
    return fd;
}

#define OPEN_BODY(dir) \
    mode_t permissions = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); permissions = va_arg(rest, mode_t); va_end(rest); } \
    return open_any(dir, path, flags, permissions)
int open(const char *path, int flags, ...) { OPEN_BODY(AT_FDCWD); }
int open64(const char *path, int flags, ...) { OPEN_BODY(AT_FDCWD); }
int openat(int dir, const char *path, int flags, ...) { OPEN_BODY(dir); }
int openat64(int dir, const char *path, int flags, ...) { OPEN_BODY(dir); }
int __open_2(const char *path, int flags) { return open_any(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return open_any(AT_FDCWD, path, flags, 0); }

static ssize_t write_any(int fd, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    int cut = 0, watched = armed && name_of(fd, path);
    if (watched && fault(WRITE, &cut)) return -1;
    if (cut) size = size > 1 ? size / 2 : 1;
    long long place = offset >= 0 ? offset : lseek(fd, 0, SEEK_CUR);
    struct stat found;
    if (watched && offset < 0 && (fcntl(fd, F_GETFL) & O_APPEND) && !fstat(fd, &found)) place = found.st_size;
    ssize_t n = offset >= 0 ? syscall(SYS_pwrite64, fd, data, size, offset) : syscall(SYS_write, fd, data, size);
    if (watched && n > 0) note("write", path, "", place, data, n);
    if (cut && mode == TORN) syscall(SYS_kill, getpid(), SIGKILL);
    return n;
}
ssize_t write(int fd, const void *data, size_t size) { return write_any(fd, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return write_any(fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return write_any(fd, data, size, offset); }

static int sync_any(int fd) {
    char path[PATH_MAX];
    int watched = armed && name_of(fd, path);
    if (watched && fault(SYNC, NULL)) return -1;
    if (watched) note("sync", path, "", 0, NULL, 0);
    return 0; /* nothing here outlives the machine */
}
int fsync(int fd) { return sync_any(fd); }
int fdatasync(int fd) { return sync_any(fd); }

static int rename_any(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    char one[PATH_MAX], two[PATH_MAX];
    const char *full_from = from, *full_to = to;
    int watched = 0;
    if (armed) {
        full_from = absolute(from_dir, from, one), full_to = absolute(to_dir, to, two);
        watched = inside(full_from) || inside(full_to);
    }
    if (watched && fault(RENAME, NULL)) return -1;
    int done = syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
    if (watched && !done) note("rename", full_from, full_to, 0, NULL, 0);
    return done;
}
int rename(const char *from, const char *to) { return rename_any(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return rename_any(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return rename_any(a, from, b, to, flags); }

static int path_call(int call, const char *what, int dir, const char *path, long system_call, long more) {
    char buffer[PATH_MAX];
    const char *full = path;
    int watched = 0;
    if (armed) {
        full = absolute(dir, path, buffer);
        watched = inside(full);
    }
    if (watched && fault(call, NULL)) return -1;
    int done = syscall(system_call, dir, path, more, 0);
    if (watched && !done) note(what, full, "", more, NULL, 0);
    return done;
}
int unlink(const char *path) { return path_call(UNLINK, "unlink", AT_FDCWD, path, SYS_unlinkat, 0); }
int rmdir(const char *path) { return path_call(UNLINK, "unlink", AT_FDCWD, path, SYS_unlinkat, AT_REMOVEDIR); }
int unlinkat(int dir, const char *path, int flags) { return path_call(UNLINK, "unlink", dir, path, SYS_unlinkat, flags); }
int mkdir(const char *path, mode_t m) { return path_call(MKDIR, "mkdir", AT_FDCWD, path, SYS_mkdirat, m); }
int mkdirat(int dir, const char *path, mode_t m) { return path_call(MKDIR, "mkdir", dir, path, SYS_mkdirat, m); }
int chmod(const char *path, mode_t m) { return path_call(CHMOD, "chmod", AT_FDCWD, path, SYS_fchmodat, m); }

static int descriptor_call(int call, int fd, const char *what, long system_call, long one, long two) {
    char path[PATH_MAX];
    int watched = armed && name_of(fd, path);
    if (watched && fault(call, NULL)) return -1;
    int done = syscall(system_call, fd, one, two);
    if (watched && !done && what) note(what, path, "", one, NULL, 0);
    return done;
}
int fchmod(int fd, mode_t m) { return descriptor_call(CHMOD, fd, NULL, SYS_fchmod, m, 0); }
int fchown(int fd, uid_t user, gid_t group) { return descriptor_call(CHMOD, fd, NULL, SYS_fchown, user, group); }
int ftruncate(int fd, off_t n) { return descriptor_call(TRUNCATE, fd, "truncate", SYS_ftruncate, n, 0); }
int ftruncate64(int fd, off64_t n) { return descriptor_call(TRUNCATE, fd, "truncate", SYS_ftruncate, n, 0); }
int flock(int fd, int how) { return descriptor_call(LOCK, fd, NULL, SYS_flock, how, 0); }

int link(const char *from, const char *to) {
    char buffer[PATH_MAX];
    int watched = armed && inside(absolute(AT_FDCWD, to, buffer));
    if (watched && fault(LINK, NULL)) return -1;
    return syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int close(int fd) { /* what network file systems report late; the descriptor is gone all the same */
    char path[PATH_MAX];
    int watched = armed && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY && name_of(fd, path);
    int failed = watched && fault(CLOSE, NULL), kept = errno;
    int done = syscall(SYS_close, fd);
    if (!failed) return done;
    errno = kept;
    return -1;
}
