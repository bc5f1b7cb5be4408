/* Calls that never return, as they do on a dead mount, a dead name server or a dead driver; by LD_PRELOAD.
   HANG=statvfs,flock,… names them; HANG_AT=/path hangs the opening of what begins so. EPOCH=1 sets the clock to 1970. Python's wrappers, and their release of the
   interpreter's lock, are the real ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void hang_if(const char *name) {
    const char *wanted = getenv("HANG");
    if (wanted == NULL || strstr(wanted, name) == NULL) return;
    for (;;) pause();
}

#define REAL(type, name) static __typeof__(type) real; if (!real) real = (__typeof__(type))dlsym(RTLD_NEXT, name)

struct statvfs;
int fstatvfs(int fd, struct statvfs *b) { hang_if("statvfs"); REAL(int (*)(int, struct statvfs *), "fstatvfs"); return real(fd, b); }
int fstatvfs64(int fd, struct statvfs *b) { hang_if("statvfs"); REAL(int (*)(int, struct statvfs *), "fstatvfs64"); return real(fd, b); }
int statvfs(const char *p, struct statvfs *b) { hang_if("statvfs"); REAL(int (*)(const char *, struct statvfs *), "statvfs"); return real(p, b); }
int statvfs64(const char *p, struct statvfs *b) { hang_if("statvfs"); REAL(int (*)(const char *, struct statvfs *), "statvfs64"); return real(p, b); }
int flock(int fd, int how) { hang_if("flock"); REAL(int (*)(int, int), "flock"); return real(fd, how); }
int fchmod(int fd, mode_t mode) { hang_if("fchmod"); REAL(int (*)(int, mode_t), "fchmod"); return real(fd, mode); }
int rename(const char *a, const char *b) { hang_if("rename"); REAL(int (*)(const char *, const char *), "rename"); return real(a, b); }
ssize_t pwrite64(int fd, const void *b, size_t n, off_t o) { hang_if("pwrite"); REAL(ssize_t (*)(int, const void *, size_t, off_t), "pwrite64"); return real(fd, b, n, o); }

static int opened(const char *symbol, const char *path, int flags, mode_t mode) {
    const char *at = getenv("HANG_AT");
    if (at != NULL && strncmp(path, at, strlen(at)) == 0) for (;;) pause();
    return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, symbol))(path, flags, mode);
}
static mode_t third(int flags, va_list rest) { return flags & (O_CREAT | O_DIRECTORY) ? va_arg(rest, mode_t) : 0; }
#define OPEN(name) int name(const char *p, int flags, ...) { va_list rest; va_start(rest, flags); mode_t mode = third(flags, rest); va_end(rest); return opened(#name, p, flags, mode); }
OPEN(open)
OPEN(open64)

struct addrinfo;
int getaddrinfo(const char *a, const char *b, const struct addrinfo *c, struct addrinfo **d) {
    hang_if("getaddrinfo");
    REAL(int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **), "getaddrinfo");
    return real(a, b, c, d);
}

struct sockaddr;
int connect(int fd, const struct sockaddr *a, unsigned int n) {
    hang_if("connect");
    REAL(int (*)(int, const struct sockaddr *, unsigned int), "connect");
    return real(fd, a, n);
}

int clock_gettime(clockid_t id, struct timespec *t) {
    REAL(int (*)(clockid_t, struct timespec *), "clock_gettime");
    int code = real(id, t);
    if (code == 0 && id == CLOCK_REALTIME && getenv("EPOCH") != NULL) t->tv_sec = 86400;
    return code;
}

/* libnvidia-ml.so.1: the first call that the binding makes of it */
int nvmlInitWithFlags(unsigned int flags) { hang_if("nvml"); (void)flags; return 999; }
int nvmlInit_v2(void) { hang_if("nvml"); return 999; }
