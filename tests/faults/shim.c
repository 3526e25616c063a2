/* Makes the calls of a process to the file system fail, one by one, or kills it there.
 *
 * Preloaded, it stands between the program and libc. Calls on what lies below two directories, the
 * source's and the target's, are counted and recorded; the call of a given number fails, transfers
 * only a part, or is the last that the process makes. Calls on anything else pass through.
 *
 * Counts and records lie in memory that the caller shares with a child, so that they outlive it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "one name of each call would do something else than the other");

/* The numbers below are those of shim.py. */
enum { SOURCE = 1, TARGET = 2 };
enum {
    READ = 1,      /* transfers content to the program */
    WRITE = 2,     /* transfers content from it */
    LOOK = 4,      /* asks for attributes, names, or a descriptor to read with */
    MAKE = 8,      /* makes a name */
    DROP = 16,     /* takes a name away */
    CHANGE = 32,   /* changes attributes, or asks for a descriptor to write with */
    SYNC = 64,     /* makes durable */
    LOCK = 128,
    HINT = 256,    /* has no effect but on speed */
    RESERVE = 512, /* takes space without content */
    CLOSE = 1024,
    EXCHANGE = 2048, /* a rename in a way that not every file system knows */
    NO_ATIME = 4096, /* opens in a way that only a file's owner may */
};
enum { PASS, FAIL, SHORT, DIE_BEFORE, DIE_AFTER, KILL_BEFORE, KILL_AFTER, STOP };
enum { HURRY = 1, FOREIGN = 2 };

enum { DESCRIPTORS = 4096, PATH_BYTES = 400, EXIT_CODE = 99, HURRY_BY = 200 };
enum { NFS_SUPER_MAGIC_ = 0x6969 };

struct record {
    char name[24];
    int32_t side;
    int32_t kind;
    int32_t error;
    int32_t is_done;
    int64_t inode;
    int64_t offset; /* bytes; of an open its flags */
    int64_t length; /* bytes asked for */
    int64_t result;
    int64_t kept; /* where the content that was written is kept; -1: nowhere */
    int64_t made; /* inode to which a name leads that was made or changed */
    int64_t mode; /* and its mode */
    char path[PATH_BYTES];
    char other[PATH_BYTES]; /* of a rename or link: what it makes */
};

struct shared {
    _Atomic int64_t count;
    _Atomic int64_t fired; /* number of the call at which it happened; -1 before */
    _Atomic int64_t slept; /* nanoseconds that the program asked to wait */
    _Atomic int64_t failed; /* kinds of all calls that were made to fail */
    _Atomic int64_t written; /* bytes that went into the target's files */
    int64_t capacity;
    struct record records[];
};

static struct {
    int is_armed;
    char roots[2][PATH_BYTES];
    int64_t at;
    int action, error, kinds, sides, onward, options;
} plan;
static struct shared *shared;
static char *content; /* what was written, if anybody asked for it */
static int64_t content_bytes;
static _Atomic int64_t content_end;
static char open_paths[DESCRIPTORS][PATH_BYTES]; /* empty: not one of ours */

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

/* Share memory of some records with children that will be armed. */
void shim_share(void *memory, int64_t capacity)
{
    shared = memory;
    shared->capacity = capacity;
}

/* Keep what armed children write; `shim_arm` forgets it. */
void shim_keep(void *memory, int64_t size)
{
    content = memory;
    content_bytes = size;
}

/* From here on count, and from call `at` on let the first of these kinds and sides have its fault;
 * all that follow of the kinds `onward` then fail as well. */
void shim_arm(const char *source, const char *target, int64_t at, int action, int error, int kinds,
              int sides, int onward, int options)
{
    snprintf(plan.roots[0], PATH_BYTES, "%s", source);
    snprintf(plan.roots[1], PATH_BYTES, "%s", target);
    memset(open_paths, 0, sizeof open_paths);
    content_end = 0;
    shared->count = 0;
    shared->fired = -1;
    shared->slept = 0;
    shared->failed = 0;
    shared->written = 0;
    plan.at = at;
    plan.action = action;
    plan.error = error;
    plan.kinds = kinds;
    plan.sides = sides;
    plan.onward = onward;
    plan.options = options;
    plan.is_armed = 1;
}

/* Be unlike a usual run, but count nothing. */
void shim_set(int options) { plan.options = options; }

/* Make a path absolute and free of dots, by its letters alone. */
static int whole_path(int directory, const char *path, char *found)
{
    char joined[2 * PATH_BYTES];
    char base[PATH_BYTES] = "";
    if (path[0] != '/') {
        if (directory == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else if (directory >= 0 && directory < DESCRIPTORS && open_paths[directory][0]) {
            memcpy(base, open_paths[directory], PATH_BYTES);
        } else {
            return 0;
        }
    }
    if (snprintf(joined, sizeof joined, "%s/%s", base, path) >= (int)sizeof joined) return 0;
    char *end = found, *rest = NULL;
    for (char *part = strtok_r(joined, "/", &rest); part; part = strtok_r(NULL, "/", &rest)) {
        if (!strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) {
            while (end > found && *--end != '/') {}
            continue;
        }
        size_t size = strlen(part);
        if (end + size + 2 > found + PATH_BYTES) return 0;
        *end++ = '/';
        memcpy(end, part, size);
        end += size;
    }
    *end = 0;
    return 1;
}

static int side_of(const char *path)
{
    for (int i = 0; i < 2; i++) {
        size_t size = strlen(plan.roots[i]);
        if (size && !strncmp(path, plan.roots[i], size) && (!path[size] || path[size] == '/'))
            return i + 1;
    }
    return 0;
}

struct call {
    struct record *record;
    struct record spare; /* where there is no room for another record */
    int64_t number;
    int action;
    int descriptor; /* -1: the call is on a path */
};

static void begin(struct call *call, const char *name, int kind, int side)
{
    call->number = atomic_fetch_add(&shared->count, 1);
    call->record =
        call->number < shared->capacity ? &shared->records[call->number] : &call->spare;
    memset(call->record, 0, sizeof *call->record);
    snprintf(call->record->name, sizeof call->record->name, "%s", name);
    call->record->kind = kind;
    call->record->side = side;
    call->record->kept = -1;
    call->descriptor = -1;
}

static int64_t inode_of(int descriptor)
{
    struct stat found;
    return syscall(SYS_fstat, descriptor, &found) ? 0 : (int64_t)found.st_ino;
}

/* Begin a call on a descriptor; false if it is not one of ours. */
static int on_descriptor(struct call *call, const char *name, int kind, int descriptor)
{
    if (!plan.is_armed || descriptor < 0 || descriptor >= DESCRIPTORS) return 0;
    if (!open_paths[descriptor][0]) return 0;
    begin(call, name, kind, side_of(open_paths[descriptor]));
    memcpy(call->record->path, open_paths[descriptor], PATH_BYTES);
    call->record->inode = inode_of(descriptor);
    call->descriptor = descriptor;
    return 1;
}

/* Begin a call on one or two paths; false if neither is one of ours. */
static int on_paths(struct call *call, const char *name, int kind, int directory, const char *path,
                    int other_directory, const char *other)
{
    char whole[PATH_BYTES] = "", other_whole[PATH_BYTES] = "";
    if (!plan.is_armed || !path) return 0;
    int saved = errno;
    int side = whole_path(directory, path, whole) ? side_of(whole) : 0;
    if (other && whole_path(other_directory, other, other_whole) && side_of(other_whole))
        side = side_of(other_whole);
    errno = saved;
    if (!side) return 0;
    begin(call, name, kind, side);
    memcpy(call->record->path, whole, PATH_BYTES);
    memcpy(call->record->other, other_whole, PATH_BYTES);
    return 1;
}

static int on_path(struct call *call, const char *name, int kind, int directory, const char *path)
{
    if (path && !path[0] && directory >= 0) return on_descriptor(call, name, kind, directory);
    return on_paths(call, name, kind, directory, path, AT_FDCWD, NULL);
}

static void die(int action)
{
    if (action == KILL_BEFORE || action == KILL_AFTER) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    syscall(SYS_exit_group, EXIT_CODE);
}

/* Decide what becomes of a call; returns PASS, FAIL (errno is set then) or SHORT. */
static int decide(struct call *call)
{
    int is_meant = (call->record->kind & plan.kinds) && (call->record->side & plan.sides);
    int64_t none = -1, fired = shared->fired;
    call->action = PASS;
    if (fired < 0 && is_meant && call->number >= plan.at &&
        atomic_compare_exchange_strong(&shared->fired, &none, call->number))
        call->action = plan.action;
    else if (fired >= 0 && (call->record->kind & plan.onward) &&
             (call->record->side & plan.sides))
        call->action = plan.action;
    if (call->action == DIE_BEFORE || call->action == KILL_BEFORE) die(call->action);
    if (call->action == STOP) kill(getpid(), SIGSTOP);
    if (call->action == FAIL) {
        atomic_fetch_or(&shared->failed, call->record->kind);
        call->record->result = -1;
        call->record->error = plan.error;
        call->record->is_done = 1;
        errno = plan.error;
    }
    return call->action;
}

/* Keep what a call has written, whichever call it was: it is read back. */
static void keep(struct call *call, int64_t size)
{
    char path[32];
    int64_t at = atomic_fetch_add(&content_end, size);
    if (at + size > content_bytes) return;
    snprintf(path, sizeof path, "/proc/self/fd/%d", call->descriptor);
    int descriptor = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return;
    if (syscall(SYS_pread64, descriptor, content + at, size, call->record->offset) == size)
        call->record->kept = at;
    syscall(SYS_close, descriptor);
}

/* Note what a name leads to, or what a descriptor is of. */
static void examine(struct call *call)
{
    struct stat found;
    const char *path = call->record->other[0] ? call->record->other : call->record->path;
    if (call->descriptor >= 0 ? syscall(SYS_fstat, call->descriptor, &found)
                              : syscall(SYS_newfstatat, AT_FDCWD, path, &found,
                                        AT_SYMLINK_NOFOLLOW))
        return;
    call->record->made = found.st_ino;
    call->record->mode = found.st_mode;
}

static void end(struct call *call, int64_t result)
{
    int saved = errno;
    if (content && call->record->side == TARGET && result >= 0) {
        if (call->record->kind & WRITE && result > 0) keep(call, result);
        if (call->record->kind & (MAKE | CHANGE)) examine(call);
    }
    call->record->result = result;
    call->record->error = result < 0 ? saved : 0;
    call->record->is_done = 1;
    if (call->record->kind & WRITE && call->record->side == TARGET && result > 0)
        atomic_fetch_add(&shared->written, result);
    if (call->action == DIE_AFTER || call->action == KILL_AFTER) die(call->action);
    errno = saved;
}

/* Do a call that says with -1 that it failed. */
#define DO(type, failed, ...) \
    if (decide(&call) == FAIL) return failed; \
    type result = (__VA_ARGS__); \
    end(&call, (int64_t)result); \
    return result

/* Bytes to transfer, where only a part of those asked for are to be. */
static size_t part_of(const struct call *call, size_t size)
{
    return call->action == SHORT ? (size + 1) / 2 : size;
}

static void remember(int descriptor, const struct call *call)
{
    if (descriptor >= 0 && descriptor < DESCRIPTORS) {
        call->record->inode = inode_of(descriptor);
        memcpy(open_paths[descriptor], call->record->path, PATH_BYTES);
    }
}

static void copy_descriptor(int from, int to)
{
    if (plan.is_armed && from >= 0 && from < DESCRIPTORS && to >= 0 && to < DESCRIPTORS)
        memcpy(open_paths[to], open_paths[from], PATH_BYTES);
}

static void forget(int descriptor)
{
    if (descriptor >= 0 && descriptor < DESCRIPTORS) open_paths[descriptor][0] = 0;
}

/* ---- descriptors */

static int kind_of_open(int flags)
{
    int kind = flags & O_NOATIME ? NO_ATIME : 0;
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) return kind | MAKE;
    return kind | ((flags & O_ACCMODE) == O_RDONLY ? LOOK : CHANGE);
}

#define OPEN_MODE \
    mode_t mode = 0; \
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

#define OPENING(directory, path, ...) \
    struct call call; \
    if (!on_path(&call, "open", kind_of_open(flags), directory, path)) return real(__VA_ARGS__); \
    call.record->offset = flags; \
    if (decide(&call) == FAIL) return -1; \
    int descriptor = real(__VA_ARGS__); \
    remember(descriptor, &call); \
    end(&call, descriptor); \
    return descriptor

int open(const char *path, int flags, ...)
{
    REAL(open);
    OPEN_MODE
    OPENING(AT_FDCWD, path, path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    REAL(open64);
    OPEN_MODE
    OPENING(AT_FDCWD, path, path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...)
{
    REAL(openat);
    OPEN_MODE
    OPENING(directory, path, directory, path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...)
{
    REAL(openat64);
    OPEN_MODE
    OPENING(directory, path, directory, path, flags, mode);
}

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

int close(int descriptor)
{
    REAL(close);
    struct call call;
    if (!on_descriptor(&call, "close", CLOSE, descriptor)) return real(descriptor);
    forget(descriptor); /* before another thread is given the same number */
    DO(int, -1, real(descriptor));
}

int dup2(int from, int to)
{
    REAL(dup2);
    int result = real(from, to);
    copy_descriptor(from, result);
    return result;
}

int dup3(int from, int to, int flags)
{
    REAL(dup3);
    int result = real(from, to, flags);
    copy_descriptor(from, result);
    return result;
}

int dup(int from)
{
    REAL(dup);
    int result = real(from);
    copy_descriptor(from, result);
    return result;
}

static int control(int (*real)(int, int, ...), int descriptor, int command, void *argument)
{
    struct call call;
    if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) {
        int result = real(descriptor, command, argument);
        copy_descriptor(descriptor, result);
        return result;
    }
    int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||
                command == F_OFD_SETLKW;
    if (!locks || !on_descriptor(&call, "fcntl", LOCK, descriptor))
        return real(descriptor, command, argument);
    DO(int, -1, real(descriptor, command, argument));
}

#define CONTROL(name) \
    int name(int descriptor, int command, ...) \
    { \
        REAL(name); \
        va_list rest; \
        va_start(rest, command); \
        void *argument = va_arg(rest, void *); \
        va_end(rest); \
        return control(real, descriptor, command, argument); \
    }
CONTROL(fcntl)
CONTROL(fcntl64)

/* ---- content */

#define TRANSFER(name, kind, type, at_type) \
    ssize_t name(int descriptor, type data, size_t size, at_type at) \
    { \
        REAL(name); \
        struct call call; \
        if (!on_descriptor(&call, #name, kind, descriptor)) \
            return real(descriptor, data, size, at); \
        call.record->offset = at; \
        call.record->length = size; \
        DO(ssize_t, -1, real(descriptor, data, part_of(&call, size), at)); \
    }
TRANSFER(pread, READ, void *, off_t)
TRANSFER(pread64, READ, void *, off64_t)
TRANSFER(pwrite, WRITE, const void *, off_t)
TRANSFER(pwrite64, WRITE, const void *, off64_t)

static int64_t position(int descriptor, int kind)
{
    struct stat found;
    if (kind == WRITE && syscall(SYS_fcntl, descriptor, F_GETFL) & O_APPEND)
        return syscall(SYS_fstat, descriptor, &found) ? 0 : (int64_t)found.st_size;
    return syscall(SYS_lseek, descriptor, 0, SEEK_CUR);
}

#define STREAM(name, kind, type) \
    ssize_t name(int descriptor, type data, size_t size) \
    { \
        REAL(name); \
        struct call call; \
        if (!on_descriptor(&call, #name, kind, descriptor)) \
            return real(descriptor, data, size); \
        call.record->offset = position(descriptor, kind); \
        call.record->length = size; \
        DO(ssize_t, -1, real(descriptor, data, part_of(&call, size))); \
    }
STREAM(read, READ, void *)
STREAM(write, WRITE, const void *)

/* Cut a list of buffers to what is to be transferred; returns their count. */
static int cut(const struct call *call, const struct iovec *from, int count, struct iovec *to)
{
    size_t left = part_of(call, call->record->length);
    int kept = 0;
    for (; kept < count && left; kept++) {
        to[kept] = from[kept];
        if (to[kept].iov_len > left) to[kept].iov_len = left;
        left -= to[kept].iov_len;
    }
    return kept ? kept : count;
}

static size_t size_of(const struct iovec *list, int count)
{
    size_t size = 0;
    for (int i = 0; i < count; i++) size += list[i].iov_len;
    return size;
}

#define VECTOR(name, kind, position_, parameters, ...) \
    ssize_t name parameters \
    { \
        REAL(name); \
        struct call call; \
        struct iovec some[IOV_MAX]; \
        if (count > IOV_MAX || !on_descriptor(&call, #name, kind, descriptor)) \
            return real(descriptor, list, count __VA_ARGS__); \
        call.record->offset = position_; \
        call.record->length = size_of(list, count); \
        if (decide(&call) == FAIL) return -1; \
        if (call.action == SHORT) { \
            count = cut(&call, list, count, some); \
            list = some; \
        } \
        ssize_t result = real(descriptor, list, count __VA_ARGS__); \
        end(&call, result); \
        return result; \
    }
#define LIST int descriptor, const struct iovec *list, int count
VECTOR(readv, READ, position(descriptor, READ), (LIST), )
VECTOR(writev, WRITE, position(descriptor, WRITE), (LIST), )
VECTOR(preadv, READ, at, (LIST, off_t at), , at)
VECTOR(preadv64, READ, at, (LIST, off64_t at), , at)
VECTOR(pwritev, WRITE, at, (LIST, off_t at), , at)
VECTOR(pwritev64, WRITE, at, (LIST, off64_t at), , at)
VECTOR(preadv2, READ, at, (LIST, off_t at, int flags), , at, flags)
VECTOR(preadv64v2, READ, at, (LIST, off64_t at, int flags), , at, flags)
VECTOR(pwritev2, WRITE, at, (LIST, off_t at, int flags), , at, flags)
VECTOR(pwritev64v2, WRITE, at, (LIST, off64_t at, int flags), , at, flags)

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size,
                        unsigned flags)
{
    REAL(copy_file_range);
    struct call call;
    if (!on_descriptor(&call, "copy_file_range", READ | WRITE, to) &&
        !on_descriptor(&call, "copy_file_range", READ, from))
        return real(from, from_at, to, to_at, size, flags);
    call.record->offset = to_at ? *to_at : position(to, WRITE);
    call.record->length = size;
    DO(ssize_t, -1, real(from, from_at, to, to_at, part_of(&call, size), flags));
}

#define SEND(name, at_type) \
    ssize_t name(int to, int from, at_type *at, size_t size) \
    { \
        REAL(name); \
        struct call call; \
        if (!on_descriptor(&call, "sendfile", READ | WRITE, to) && \
            !on_descriptor(&call, "sendfile", READ, from)) \
            return real(to, from, at, size); \
        call.record->offset = position(to, WRITE); \
        call.record->length = size; \
        DO(ssize_t, -1, real(to, from, at, part_of(&call, size))); \
    }
SEND(sendfile, off_t)
SEND(sendfile64, off64_t)

#define MAP(name, at_type) \
    void *name(void *where, size_t size, int protection, int flags, int descriptor, at_type at) \
    { \
        REAL(name); \
        struct call call; \
        if (!on_descriptor(&call, "mmap", LOOK, descriptor)) \
            return real(where, size, protection, flags, descriptor, at); \
        DO(void *, MAP_FAILED, real(where, size, protection, flags, descriptor, at)); \
    }
MAP(mmap, off_t)
MAP(mmap64, off64_t)

/* ---- space, durability, hints, locks */

#define ON_DESCRIPTOR(name, kind, parameters, ...) \
    int name parameters \
    { \
        REAL(name); \
        struct call call; \
        if (!on_descriptor(&call, #name, kind, descriptor)) return real(descriptor __VA_ARGS__); \
        DO(int, -1, real(descriptor __VA_ARGS__)); \
    }
ON_DESCRIPTOR(fsync, SYNC, (int descriptor), )
ON_DESCRIPTOR(fdatasync, SYNC, (int descriptor), )
ON_DESCRIPTOR(syncfs, SYNC, (int descriptor), )
ON_DESCRIPTOR(sync_file_range, HINT,
              (int descriptor, off64_t at, off64_t size, unsigned flags), , at, size, flags)
ON_DESCRIPTOR(fallocate, RESERVE, (int descriptor, int mode, off_t at, off_t size), , mode, at,
              size)
ON_DESCRIPTOR(fallocate64, RESERVE, (int descriptor, int mode, off64_t at, off64_t size), , mode,
              at, size)
ON_DESCRIPTOR(lockf, LOCK, (int descriptor, int operation, off_t size), , operation, size)
ON_DESCRIPTOR(lockf64, LOCK, (int descriptor, int operation, off64_t size), , operation, size)
ON_DESCRIPTOR(fchmod, CHANGE, (int descriptor, mode_t mode), , mode)
ON_DESCRIPTOR(fchown, CHANGE, (int descriptor, uid_t user, gid_t group), , user, group)
ON_DESCRIPTOR(futimens, CHANGE, (int descriptor, const struct timespec times[2]), ,
              times)
ON_DESCRIPTOR(fstat, LOOK, (int descriptor, struct stat *found), , found)
ON_DESCRIPTOR(fstat64, LOOK, (int descriptor, struct stat64 *found), , found)
ON_DESCRIPTOR(fstatvfs, LOOK, (int descriptor, struct statvfs *found), , found)
ON_DESCRIPTOR(fstatvfs64, LOOK, (int descriptor, struct statvfs64 *found), , found)

int flock(int descriptor, int operation)
{
    REAL(flock);
    struct call call;
    if (!on_descriptor(&call, "flock", LOCK, descriptor)) return real(descriptor, operation);
    DO(int, -1, real(descriptor, operation));
}

#define TRUNCATE(name, at_type) \
    int name(int descriptor, at_type size) \
    { \
        REAL(name); \
        struct call call; \
        if (!on_descriptor(&call, "ftruncate", RESERVE, descriptor)) \
            return real(descriptor, size); \
        call.record->offset = size; \
        DO(int, -1, real(descriptor, size)); \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

/* These return the error, and leave errno alone. */
#define RETURNS_ERROR(name, kind, parameters, ...) \
    int name parameters \
    { \
        REAL(name); \
        struct call call; \
        if (!on_descriptor(&call, #name, kind, descriptor)) return real(descriptor, __VA_ARGS__); \
        int saved = errno; \
        if (decide(&call) == FAIL) { \
            errno = saved; \
            return plan.error; \
        } \
        int result = real(descriptor, __VA_ARGS__); \
        end(&call, result); \
        return result; \
    }
RETURNS_ERROR(posix_fadvise, HINT, (int descriptor, off_t at, off_t size, int advice), at, size,
              advice)
RETURNS_ERROR(posix_fadvise64, HINT, (int descriptor, off64_t at, off64_t size, int advice), at,
              size, advice)
RETURNS_ERROR(posix_fallocate, RESERVE, (int descriptor, off_t at, off_t size), at, size)
RETURNS_ERROR(posix_fallocate64, RESERVE, (int descriptor, off64_t at, off64_t size), at, size)

/* Say of the target, if asked to, that it lies on a network file system. */
#define FILE_SYSTEM(name, type) \
    int name(int descriptor, struct type *found) \
    { \
        REAL(name); \
        struct call call; \
        if (!on_descriptor(&call, "fstatfs", LOOK, descriptor)) return real(descriptor, found); \
        if (decide(&call) == FAIL) return -1; \
        int result = real(descriptor, found); \
        if (plan.options & FOREIGN) found->f_type = NFS_SUPER_MAGIC_; \
        end(&call, result); \
        return result; \
    }
FILE_SYSTEM(fstatfs, statfs)
FILE_SYSTEM(fstatfs64, statfs64)

/* ---- names */

#define ON_PATH(result_type, name, label, kind, directory, parameters, ...) \
    result_type name parameters \
    { \
        REAL(name); \
        struct call call; \
        if (!on_path(&call, label, kind, directory, path)) return real(__VA_ARGS__); \
        DO(result_type, -1, real(__VA_ARGS__)); \
    }
#define PATH const char *path
ON_PATH(int, stat, "stat", LOOK, AT_FDCWD, (PATH, struct stat *found), path, found)
ON_PATH(int, stat64, "stat", LOOK, AT_FDCWD, (PATH, struct stat64 *found), path, found)
ON_PATH(int, lstat, "lstat", LOOK, AT_FDCWD, (PATH, struct stat *found), path, found)
ON_PATH(int, lstat64, "lstat", LOOK, AT_FDCWD, (PATH, struct stat64 *found), path, found)
ON_PATH(int, fstatat, "fstatat", LOOK, at, (int at, PATH, struct stat *found, int flags), at, path,
        found, flags)
ON_PATH(int, fstatat64, "fstatat", LOOK, at, (int at, PATH, struct stat64 *found, int flags), at,
        path, found, flags)
ON_PATH(int, statx, "statx", LOOK, at,
        (int at, PATH, int flags, unsigned mask, struct statx *found), at, path, flags, mask, found)
ON_PATH(int, statvfs, "statvfs", LOOK, AT_FDCWD, (PATH, struct statvfs *found), path, found)
ON_PATH(int, statvfs64, "statvfs", LOOK, AT_FDCWD, (PATH, struct statvfs64 *found), path, found)
ON_PATH(int, access, "access", LOOK, AT_FDCWD, (PATH, int mode), path, mode)
ON_PATH(int, faccessat, "faccessat", LOOK, at, (int at, PATH, int mode, int flags), at, path, mode,
        flags)
ON_PATH(ssize_t, readlink, "readlink", LOOK, AT_FDCWD, (PATH, char *found, size_t size), path,
        found, size)
ON_PATH(ssize_t, readlinkat, "readlinkat", LOOK, at, (int at, PATH, char *found, size_t size), at,
        path, found, size)
ON_PATH(int, mkdir, "mkdir", MAKE, AT_FDCWD, (PATH, mode_t mode), path, mode)
ON_PATH(int, mkdirat, "mkdirat", MAKE, at, (int at, PATH, mode_t mode), at, path, mode)
ON_PATH(int, rmdir, "rmdir", DROP, AT_FDCWD, (PATH), path)
ON_PATH(int, unlink, "unlink", DROP, AT_FDCWD, (PATH), path)
ON_PATH(int, unlinkat, "unlinkat", DROP, at, (int at, PATH, int flags), at, path, flags)
ON_PATH(int, chmod, "chmod", CHANGE, AT_FDCWD, (PATH, mode_t mode), path, mode)
ON_PATH(int, fchmodat, "fchmodat", CHANGE, at, (int at, PATH, mode_t mode, int flags), at, path,
        mode, flags)
ON_PATH(int, chown, "chown", CHANGE, AT_FDCWD, (PATH, uid_t user, gid_t group), path, user, group)
ON_PATH(int, truncate, "truncate", RESERVE, AT_FDCWD, (PATH, off_t size), path, size)
ON_PATH(int, truncate64, "truncate", RESERVE, AT_FDCWD, (PATH, off64_t size), path, size)

ON_PATH(int, utimensat, "utimensat", CHANGE, at,
        (int at, PATH, const struct timespec times[2], int flags), at, path, times, flags)

#define ON_TWO(name, kind, from_at, to_at, parameters, ...) \
    int name parameters \
    { \
        REAL(name); \
        struct call call; \
        if (!on_paths(&call, #name, kind, from_at, from, to_at, to)) return real(__VA_ARGS__); \
        DO(int, -1, real(__VA_ARGS__)); \
    }
#define FROM const char *from
#define TO const char *to
ON_TWO(rename, MAKE | DROP, AT_FDCWD, AT_FDCWD, (FROM, TO), from, to)
ON_TWO(renameat, MAKE | DROP, from_at, to_at, (int from_at, FROM, int to_at, TO), from_at, from,
       to_at, to)
ON_TWO(renameat2, MAKE | DROP | (flags ? EXCHANGE : 0), from_at, to_at,
       (int from_at, FROM, int to_at, TO, unsigned flags), from_at, from, to_at, to, flags)
ON_TWO(link, MAKE, AT_FDCWD, AT_FDCWD, (FROM, TO), from, to)
ON_TWO(linkat, MAKE, from_at, to_at, (int from_at, FROM, int to_at, TO, int flags), from_at, from,
       to_at, to, flags)

ON_PATH(int, symlink, "symlink", MAKE, AT_FDCWD, (const char *to, PATH), to, path)
ON_PATH(int, symlinkat, "symlinkat", MAKE, at, (const char *to, int at, PATH), to, at, path)

/* ---- directories */

DIR *opendir(const char *path)
{
    REAL(opendir);
    struct call call;
    if (!on_path(&call, "opendir", LOOK, AT_FDCWD, path)) return real(path);
    if (decide(&call) == FAIL) return NULL;
    DIR *stream = real(path);
    if (stream) remember(dirfd(stream), &call);
    end(&call, stream ? 0 : -1);
    return stream;
}

DIR *fdopendir(int descriptor)
{
    REAL(fdopendir);
    struct call call;
    if (!on_descriptor(&call, "fdopendir", LOOK, descriptor)) return real(descriptor);
    if (decide(&call) == FAIL) return NULL;
    DIR *stream = real(descriptor);
    end(&call, stream ? 0 : -1);
    return stream;
}

int closedir(DIR *stream)
{
    REAL(closedir);
    if (plan.is_armed) forget(dirfd(stream));
    return real(stream);
}

#define ENTRY(name, type) \
    struct type *name(DIR *stream) \
    { \
        REAL(name); \
        struct call call; \
        if (!on_descriptor(&call, "readdir", LOOK, dirfd(stream))) return real(stream); \
        if (decide(&call) == FAIL) return NULL; \
        struct type *found = real(stream); \
        end(&call, found ? 1 : 0); \
        return found; \
    }
ENTRY(readdir, dirent)
ENTRY(readdir64, dirent64)

/* ---- time: a clock may be wrong */

static int64_t clock_ahead;

/* Let the clock of this process be ahead by so many nanoseconds, or behind. */
void shim_clock(int64_t ahead) { clock_ahead = ahead; }

int clock_gettime(clockid_t clock, struct timespec *found)
{
    REAL(clock_gettime);
    int result = real(clock, found);
    if (!result && clock == CLOCK_REALTIME && clock_ahead) {
        int64_t value = found->tv_sec * INT64_C(1000000000) + found->tv_nsec + clock_ahead;
        *found = (struct timespec){value / 1000000000, value % 1000000000};
    }
    return result;
}

/* ---- waiting: what is tried again after a while is tried again after a moment */

static int64_t nanoseconds(const struct timespec *time)
{
    return time->tv_sec * INT64_C(1000000000) + time->tv_nsec;
}

static struct timespec timespec_of(int64_t value)
{
    return (struct timespec){value / 1000000000, value % 1000000000};
}

/* Bring a moment nearer. */
static struct timespec sooner(clockid_t clock, const struct timespec *moment)
{
    struct timespec now;
    clock_gettime(clock, &now);
    int64_t left = nanoseconds(moment) - nanoseconds(&now);
    if (left < 0) left = 0;
    atomic_fetch_add(&shared->slept, left);
    return timespec_of(nanoseconds(&now) + left / HURRY_BY);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *asked, struct timespec *left)
{
    REAL(clock_nanosleep);
    if (!plan.is_armed || !(plan.options & HURRY)) return real(clock, flags, asked, left);
    struct timespec time;
    if (flags & TIMER_ABSTIME) {
        time = sooner(clock, asked);
    } else {
        atomic_fetch_add(&shared->slept, nanoseconds(asked));
        time = timespec_of(nanoseconds(asked) / HURRY_BY);
    }
    return real(clock, flags, &time, left);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *moment)
{
    REAL(sem_clockwait);
    if (!plan.is_armed || !(plan.options & HURRY)) return real(semaphore, clock, moment);
    struct timespec near = sooner(clock, moment);
    return real(semaphore, clock, &near);
}
