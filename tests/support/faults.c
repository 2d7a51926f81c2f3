/* Kills this process, or makes its disk fail, at a call that changes the disk: built and used by faults.py.
 *
 * For LD_PRELOAD. Calls are counted once a process has called arm(); those on pipes, devices and the standard streams
 * are not.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, FULL, IO, STOP };

static volatile long *calls; /* shared with who started this process */
static long at;
static int mode;

void arm(volatile long *counter, long number, int how) {
    at = number, mode = how, calls = counter;
}

/* What the next call ends with: 0 or an errno. `grows`: whether it takes space on the disk. */
static int next(int grows) {
    if (!calls) return 0;
    long now = ++*calls;
    if (now == at && (mode == KILL || mode == STOP)) kill(getpid(), mode == KILL ? SIGKILL : SIGTERM);
    if (now == at && mode == IO) return EIO;
    return mode == FULL && now >= at && grows ? ENOSPC : 0;
}

static int regular(int fd) {
    struct stat status;
    int before = errno, is = fd > 2 && !fstat(fd, &status) && S_ISREG(status.st_mode);
    errno = before;
    return is;
}

/* Whether the next call is the one that gets only half as far: where it is killed, or the disk becomes full. */
static int half(int fd) { return calls && (mode == KILL || mode == FULL) && *calls + 1 == at && regular(fd); }

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define FAIL(code) return errno = (code), -1

#define CALL(name, counts, grows, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        int error = (counts) ? next(grows) : 0; \
        if (error) FAIL(error); \
        return real arguments; \
    }

CALL(rename, 1, 0, (const char *from, const char *to), (from, to))
CALL(renameat, 1, 0, (int a, const char *from, int b, const char *to), (a, from, b, to))
CALL(renameat2, 1, 0, (int a, const char *from, int b, const char *to, unsigned flags), (a, from, b, to, flags))
CALL(unlink, 1, 0, (const char *path), (path))
CALL(unlinkat, 1, 0, (int fd, const char *path, int flags), (fd, path, flags))
CALL(mkdir, 1, 1, (const char *path, mode_t mode_), (path, mode_))
CALL(mkdirat, 1, 1, (int fd, const char *path, mode_t mode_), (fd, path, mode_))
CALL(rmdir, 1, 0, (const char *path), (path))
CALL(ftruncate, regular(fd), 0, (int fd, off_t size), (fd, size))
CALL(ftruncate64, regular(fd), 0, (int fd, off64_t size), (fd, size))
CALL(truncate, 1, 0, (const char *path, off_t size), (path, size))
CALL(fsync, regular(fd), 0, (int fd), (fd))
CALL(fdatasync, regular(fd), 0, (int fd), (fd))
CALL(link, 1, 1, (const char *from, const char *to), (from, to))
CALL(symlink, 1, 1, (const char *from, const char *to), (from, to))
CALL(chmod, 1, 0, (const char *path, mode_t mode_), (path, mode_))
CALL(fchmod, regular(fd), 0, (int fd, mode_t mode_), (fd, mode_))
CALL(fchmodat, 1, 0, (int fd, const char *path, mode_t mode_, int flags), (fd, path, mode_, flags))

#define ALLOCATE(name, type) \
    int name(int fd, type start, type size) { \
        REAL(name); \
        int error = regular(fd) ? next(1) : 0; \
        return error ? error : real(fd, start, size); \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

#define WRITE(name, parameters, some, all) \
    ssize_t name parameters { \
        REAL(name); \
        if (half(fd) && size > 1) { \
            ssize_t done = real some; \
            next(0); \
            return done; \
        } \
        int error = regular(fd) ? next(1) : 0; \
        if (error) FAIL(error); \
        return real all; \
    }
WRITE(write, (int fd, const void *from, size_t size), (fd, from, size / 2), (fd, from, size))
WRITE(pwrite, (int fd, const void *from, size_t size, off_t to), (fd, from, size / 2, to), (fd, from, size, to))
WRITE(pwrite64, (int fd, const void *from, size_t size, off64_t to), (fd, from, size / 2, to), (fd, from, size, to))
WRITE(writev, (int fd, const struct iovec *from, int size), (fd, from, size / 2), (fd, from, size))
WRITE(sendfile, (int fd, int from, off_t *start, size_t size), (fd, from, start, size / 2), (fd, from, start, size))
WRITE(sendfile64, (int fd, int from, off64_t *start, size_t size), (fd, from, start, size / 2), (fd, from, start, size))

ssize_t copy_file_range(int from, off64_t *start, int fd, off64_t *to, size_t size, unsigned flags) {
    REAL(copy_file_range);
    int error = regular(fd) ? next(1) : 0;
    if (error) FAIL(error);
    return real(from, start, fd, to, size, flags);
}

/* Whether opening the file changes the disk. */
static int makes(const char *path, int flags) {
    struct stat status;
    if (!(flags & (O_CREAT | O_TRUNC)) || !strncmp(path, "/dev/", 5) || !strncmp(path, "/proc/", 6)) return 0;
    int before = errno, there = !stat(path, &status);
    errno = before;
    return flags & O_TRUNC || !there;
}

#define OPEN(name, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode_ = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        int error = calls && makes(path, flags) ? next(flags & O_CREAT) : 0; \
        if (error) FAIL(error); \
        return real arguments; \
    }
OPEN(open, (const char *path, int flags, ...), (path, flags, mode_))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode_))
OPEN(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode_))
OPEN(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode_))
