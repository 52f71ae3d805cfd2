/* A libnccl.so.2 that does nothing but note what it was given, in the types that NCCL declares. */
#include <limits.h>
#include <stddef.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
    int trafficClass;
    const char *commName;
} ncclConfig_t;

/* What the test reads: how often each was called, and what was wrong first. */
int stub_calls[8];
char stub_complaint[64];
int stub_version = 22907;
int stub_result = 0;
int stub_state = 7;
static int the_communicator;
void *stub_communicator = &the_communicator;
const char *stub_name;

static int note(int which, const char *complaint) {
    stub_calls[which]++;
    if (complaint && !stub_complaint[0]) strncpy(stub_complaint, complaint, sizeof(stub_complaint) - 1);
    return stub_result;
}

int ncclGetVersion(int *version) { *version = stub_version; return 0; }
const char *ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "some error"; }
const char *ncclGetLastError(void *comm) { return comm ? "the wrong one" : "Duplicate GPU detected\n"; }

int ncclGetUniqueId(ncclUniqueId *id) {
    for (int at = 0; at < 128; at++) id->internal[at] = (char)at;
    return note(0, NULL);
}

int ncclCommInitRankConfig(void **comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    const char *wrong = NULL;
    *comm = stub_communicator;
    if (nranks != 2) wrong = "ranks";
    if (rank != 1) wrong = "rank";
    for (int at = 0; at < 128; at++) if (id.internal[at] != (char)at) wrong = "id";
    if (config->size != sizeof(ncclConfig_t)) wrong = "size";
    if (config->magic != 0xcafebeef) wrong = "magic";
    if (config->version != 22700) wrong = "version";
    if (config->blocking != 0) wrong = "blocking";
    if (config->cgaClusterSize != INT_MIN) wrong = "cgaClusterSize";
    if (config->minCTAs != 1) wrong = "minCTAs";
    if (config->maxCTAs != 2) wrong = "maxCTAs";
    if (config->netName != NULL) wrong = "netName";
    if (config->splitShare != INT_MIN) wrong = "splitShare";
    if (config->trafficClass != INT_MIN) wrong = "trafficClass";
    if (strcmp(config->commName, "kv to d")) wrong = "commName";
    stub_name = config->commName;
    note(1, wrong);
    return stub_result ? stub_result : 7;
}

int ncclCommGetAsyncError(void *comm, int *state) {
    *state = stub_state;
    return note(2, comm == stub_communicator ? NULL : "communicator");
}

static const char *transfer(const void *buffer, size_t count, int type, int peer, void *comm, void *stream, int to) {
    if (buffer != (void *)0x700000001000) return "buffer";
    if (count != ((size_t)5 << 32)) return "count";
    if (type != 1) return "type";
    if (peer != to) return "peer";
    if (comm != stub_communicator) return "communicator";
    return stream == (void *)0x600000002000 ? NULL : "stream";
}

int ncclSend(const void *buffer, size_t count, int type, int peer, void *comm, void *stream) {
    return note(3, transfer(buffer, count, type, peer, comm, stream, 1));
}

int ncclRecv(void *buffer, size_t count, int type, int peer, void *comm, void *stream) {
    return note(4, transfer(buffer, count, type, peer, comm, stream, 0));
}

int ncclCommAbort(void *comm) { return note(5, comm == stub_communicator ? NULL : "communicator"); }
