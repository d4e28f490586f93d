/*
 * A stand-in for the CANN runtime, for machines without an NPU.
 *
 * It lets torch_npu be imported: operator schemas, Meta kernels and CPU emulation work, computing on 'npu' tensors does not.
 * The build tool appends an empty function for every other symbol that the wheel links to.
 *
 *   CANN_STUB_DEVICES  devices to report          (default 0; more makes torch.npu.is_available() true although nothing computes)
 *   CANN_STUB_SOC      SoC name to report         (default Ascend950PR_9579)
 *   CANN_STUB_VERSION  CANN version to report     (default 9.2.0)
 *
 * Types are reduced to their ABI: enums are int, handles are void pointers. 0 is ACL_SUCCESS, 100000 is ACL_ERROR_INVALID_PARAM.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DONE = 0, INVALID = 100000, PAGE = 512 };
#define REQUIRE(pointer) if (!(pointer)) return INVALID

static const char *environment(const char *name, const char *otherwise) {
    const char *text = getenv(name);
    return text && text[0] ? text : otherwise;
}

static long device_count(void) {
    long count = atol(environment("CANN_STUB_DEVICES", "0"));
    return count < 0 ? 0 : count > 64 ? 64 : count;
}

/* ---- version and SoC: looked up by name at run time, so they must be exported though nothing links to them */
const char *aclrtGetSocName(void) { return environment("CANN_STUB_SOC", "Ascend950PR_9579"); }
int aclsysGetVersionStr(char *package, char *out) {
    (void)package;
    REQUIRE(out);
    snprintf(out, 128, "%s", environment("CANN_STUB_VERSION", "9.2.0"));
    return DONE;
}
struct version_record { char version[128], major[64], minor[64], release[64], patch[64], reserved[128]; };
int aclsysGetCANNVersion(int package, struct version_record *out) {
    (void)package;
    REQUIRE(out);
    memset(out, 0, sizeof(*out));
    return aclsysGetVersionStr(NULL, out->version);
}
const char *aclGetRecentErrMsg(void) { return "this is the CANN stub: there is no NPU behind it"; }

/* ---- devices and contexts */
static __thread int32_t selected;
static __thread char context;
int aclrtGetDeviceCount(uint32_t *out) { REQUIRE(out); *out = (uint32_t)device_count(); return DONE; }
int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= device_count()) return INVALID;
    selected = device;
    return DONE;
}
int aclrtGetDevice(int32_t *out) { REQUIRE(out); *out = selected; return DONE; }
int aclrtGetCurrentContext(void **out) { REQUIRE(out); *out = device_count() ? &context : NULL; return DONE; }
int aclrtDeviceCanAccessPeer(int32_t *out, int32_t from, int32_t to) { (void)from; (void)to; REQUIRE(out); *out = 0; return DONE; }
int aclGetDeviceCapability(uint32_t device, int what, int64_t *out) { (void)device; (void)what; REQUIRE(out); *out = 1; return DONE; }
int aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
    (void)kind;
    if (available) *available = (size_t)1 << 30;
    if (total) *total = (size_t)1 << 30;
    return DONE;
}

int aclrtGetSysParamOpt(int option, int64_t *out) { (void)option; REQUIRE(out); *out = 0; return DONE; }
int aclrtSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return DONE; }
int aclrtCtxGetSysParamOpt(int option, int64_t *out) { return aclrtGetSysParamOpt(option, out); }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { (void)seconds; return DONE; }
int aclrtSynchronizeDevice(void) { return DONE; }
int aclrtSynchronizeDeviceWithTimeout(int32_t ms) { (void)ms; return DONE; }
int aclrtSetDeviceSatMode(int mode) { (void)mode; return DONE; }

/* ---- "device" memory is host memory */
static int obtain(void **out, size_t bytes) { REQUIRE(out); return posix_memalign(out, PAGE, bytes ? bytes : PAGE) ? INVALID : DONE; }
static int copy(void *to, size_t room, const void *from, size_t bytes) {
    if (bytes > room) return INVALID;
    memmove(to, from, bytes);
    return DONE;
}
static int fill(void *to, size_t room, int32_t value, size_t bytes) {
    if (bytes > room) return INVALID;
    memset(to, value, bytes);
    return DONE;
}
int aclrtMalloc(void **out, size_t bytes, int policy) { (void)policy; return obtain(out, bytes); }
int aclrtMallocAlign32(void **out, size_t bytes, int policy) { (void)policy; return obtain(out, bytes); }
int aclrtMallocHost(void **out, size_t bytes) { return obtain(out, bytes); }
int aclrtFree(void *p) { free(p); return DONE; }
int aclrtFreeHost(void *p) { free(p); return DONE; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) { (void)kind; return copy(to, room, from, bytes); }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    (void)kind; (void)stream;
    return copy(to, room, from, bytes);
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) { return fill(to, room, value, bytes); }
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, void *stream) {
    (void)stream;
    return fill(to, room, value, bytes);
}

/* ---- streams and events are tokens; everything has always finished */
static int new_token(void **out) { REQUIRE(out); *out = calloc(1, 16); return *out ? DONE : INVALID; }
static int drop_token(void *p) { free(p); return DONE; }
static int say(int *out, int status) { REQUIRE(out); *out = status; return DONE; }
int aclrtCreateStream(void **out) { return new_token(out); }
int aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flags) { (void)priority; (void)flags; return new_token(out); }
int aclrtDestroyStream(void *p) { return drop_token(p); }
int aclrtDestroyStreamForce(void *p) { return drop_token(p); }
int aclrtSetStreamAttribute(void *p, int what, void *value) { (void)p; (void)what; (void)value; return DONE; }
int aclrtStreamQuery(void *p, int *status) { (void)p; return say(status, 0); }
int aclrtCreateEvent(void **out) { return new_token(out); }
int aclrtCreateEventWithFlag(void **out, uint32_t flags) { (void)flags; return new_token(out); }
int aclrtCreateEventExWithFlag(void **out, uint32_t flags) { (void)flags; return new_token(out); }
int aclrtDestroyEvent(void *p) { return drop_token(p); }
int aclrtQueryEventStatus(void *p, int *status) { (void)p; return say(status, 1); }
int aclrtQueryEventWaitStatus(void *p, int *status) { (void)p; return say(status, 1); }
int aclrtEventElapsedTime(float *ms, void *from, void *to) { (void)from; (void)to; REQUIRE(ms); *ms = 0; return DONE; }

/* ---- graphs: a capture records nothing and a replay does nothing */
static __thread int capturing;
static char graph;
int aclmdlRICaptureBegin(void *stream, int mode) { (void)stream; (void)mode; capturing = 1; return DONE; }
int aclmdlRICaptureEnd(void *stream, void **out) { (void)stream; REQUIRE(out); capturing = 0; *out = &graph; return DONE; }
int aclmdlRICaptureGetInfo(void *stream, int *status, void **out) {
    (void)stream;
    if (out) *out = &graph;
    return say(status, capturing);
}
int aclmdlRICaptureThreadExchangeMode(int *mode) { (void)mode; return DONE; }
int aclmdlRIExecuteAsync(void *model, void *stream) { (void)model; (void)stream; return DONE; }
int aclmdlRIDestroy(void *model) { (void)model; return DONE; }
