/* CUDA's runtime and driver in one, which do nothing but note what they were given, in the types that CUDA declares. */
#include <stddef.h>
#include <string.h>

typedef struct { char reserved[64]; } cudaIpcMemHandle_t;

/* What the test sets and reads: what is answered, what is left allocated or open, and the error that nobody cleared. */
int stub_result = 0;
int stub_handle_result = 0;
int stub_range_result = 0;
int stub_offset = 0; /* of what is opened, in its allocation */
int stub_allocated = 0;
int stub_opened = 0;
int stub_last_error = 0;
char stub_complaint[64];
static char memory[4096];

static int answer(int result, const char *complaint) {
    if (complaint && !stub_complaint[0]) strncpy(stub_complaint, complaint, sizeof(stub_complaint) - 1);
    if (result) stub_last_error = result;
    return result;
}

int cudaMalloc(void **address, size_t size) {
    *address = memory;
    stub_allocated++;
    return answer(0, size == (size_t)5 << 32 ? NULL : "size");
}

int cudaFree(void *address) {
    stub_allocated--;
    return answer(0, address == memory ? NULL : "freed address");
}

int cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address) {
    memset(handle->reserved, 7, sizeof(handle->reserved));
    return answer(stub_handle_result, address == memory ? NULL : "shared address");
}

int cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t handle, unsigned int flags) {
    const char *wrong = flags == 1 ? NULL : "flags";
    for (int at = 0; at < 64; at++) if (handle.reserved[at] != (char)at) wrong = "handle";
    *address = memory + stub_offset;
    stub_opened += !stub_result;
    return answer(stub_result, wrong);
}

int cudaIpcCloseMemHandle(void *address) {
    stub_opened--;
    return answer(stub_result, address == memory + stub_offset ? NULL : "closed address");
}

/* The one without a number is for addresses of 32 bits. */
int cuMemGetAddressRange(unsigned int *base, unsigned int *size, unsigned int address) {
    *base = *size = 0;
    return answer(0, "interface of 32 bits");
}

int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long address) {
    *base = (unsigned long long)memory;
    *size = sizeof(memory);
    /* The driver's errors are not the runtime's. */
    if (address != (unsigned long long)(memory + stub_offset)) answer(0, "address of the range");
    return stub_range_result;
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    const char *wrong = kind == 4 ? NULL : "kind";
    if (from != memory + 1024 || size != 3) wrong = "what is copied";
    if (stream != (void *)0x600000002000) wrong = "stream";
    ((char *)to)[0] = 42;
    return answer(stub_result, wrong);
}

const char *cudaGetErrorString(int result) { return result == 201 ? "invalid device context" : "some error"; }

int cudaGetLastError(void) {
    int last = stub_last_error;
    stub_last_error = 0;
    return last;
}
