/* A CUDA runtime with one card, on which nothing runs: to be preloaded, so that torch's CUDA build compiles for
 * that card on a machine without any. NANOHEADS_CARD says which: 90, 80, 89, 75, 100 or 120.
 *
 * Here are the questions that torch asks before it compiles. gpu/environment.py adds a function that returns 0
 * for each of the others. What would launch a kernel is never reached: all tensors are fake.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

struct card {
  int capability;          /* 90: sm_90 */
  const char *name;
  int processors;
  int shared;              /* bytes of shared memory that one block may ask for */
  int threads;             /* on one processor at a time */
  int l2;                  /* bytes */
  int bus;                 /* bits */
  size_t memory;           /* bytes */
};

/* CUDA C++ programming guide, "Technical specifications per compute capability", and NVIDIA's datasheets */
static const struct card CARDS[] = {
  {90, "NVIDIA H100 80GB HBM3", 132, 227 << 10, 2048, 50 << 20, 5120, 80UL << 30},
  {80, "NVIDIA A100-SXM4-80GB", 108, 163 << 10, 2048, 40 << 20, 5120, 80UL << 30},
  {89, "NVIDIA GeForce RTX 4090", 128, 99 << 10, 1536, 72 << 20, 384, 24UL << 30},
  {75, "Tesla T4", 40, 64 << 10, 1024, 4 << 20, 256, 16UL << 30},
  {100, "NVIDIA B200", 148, 227 << 10, 2048, 126 << 20, 8192, 180UL << 30},
  {120, "NVIDIA GeForce RTX 5090", 170, 99 << 10, 1536, 96 << 20, 512, 32UL << 30},
};

static const struct card *card(void) {
  const char *wanted = getenv("NANOHEADS_CARD");
  int i;
  for (i = 0; wanted && i < (int)(sizeof CARDS / sizeof *CARDS); i++)
    if (CARDS[i].capability == atoi(wanted)) return CARDS + i;
  return CARDS;
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int device) {
  strncpy(id, "0000:01:00.0", n);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
  *left = *all = card()->memory;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  const struct card *c = card();
  int i;
  memset(p, 0, sizeof *p);
  strcpy(p->name, c->name);
  p->major = c->capability / 10;
  p->minor = c->capability % 10;
  p->totalGlobalMem = c->memory;
  p->multiProcessorCount = c->processors;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = c->threads;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = c->shared;
  p->sharedMemPerMultiprocessor = c->shared + 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = c->l2;
  p->memoryBusWidth = c->bus;
  for (i = 0; i < 3; i++) {
    p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    p->maxGridSize[i] = i ? 65535 : 2147483647;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  const struct card *c = card();
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = c->capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = c->capability % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = c->processors; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = c->threads; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = c->shared; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = c->shared + 1024; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

/* ---- streams and memory: never used, but asked for ---- */

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = (cudaStream_t)malloc(8);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *n) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n) {
  *p = aligned_alloc(512, (n + 511) / 512 * 512);
  return cudaSuccess;
}

/* ---- the driver's functions, which torch asks for by name ---- */

static int nothing(void) { return 0; }

static int context_state(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *found) {
  *function = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)nothing : (void *)context_state;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
  return cudaGetDriverEntryPoint(name, function, flags, found);
}
