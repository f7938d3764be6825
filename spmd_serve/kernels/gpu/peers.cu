// Sums and choices over the GPUs of one host for small tensors: each rank writes its part into every other rank's memory.
//
// A cell of 16 bytes carries 8 bytes of data and twice the number of the call, in words 1 and 3. A store of 16 bytes arrives
// in halves of 8 that are whole in themselves, so a reader that sees both numbers has all data: there is no barrier, no flag
// that must follow the data, and one trip over the link is all the time that passes. A block has cells of its own, for two
// calls in turn, and counts its calls itself. A cell is written again two calls later: by then its reader is done,
// since the writer has its answer to the call between, which the reader sent after its own kernel before that had ended.
//
// All ranks make the same calls in the same order on one stream each. Sums are in rank order, so all hold the same bits.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256, kMaxRanks = 8;

struct Peers {
  uint4* cells[kMaxRanks];  // each rank's memory: [block][call parity][writer][thread]
  uint32_t* calls;          // [block], of this rank
  int rank, ranks;
};

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void write_cell(uint4* at, uint2 data, uint32_t call) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(data.x), "r"(call), "r"(data.y), "r"(call)
               : "memory");
}

__device__ __forceinline__ uint2 read_cell(const uint4* at, uint32_t call) {
  uint4 v;
  do {
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
  } while (v.y != call || v.w != call);
  return make_uint2(v.x, v.z);
}

__device__ __forceinline__ size_t cell(const Peers& p, uint32_t call, int writer) {
  return ((size_t)(blockIdx.x * 2 + (call & 1)) * p.ranks + writer) * kThreads + threadIdx.x;
}

__device__ __forceinline__ void send(const Peers& p, uint2 data, uint32_t call) {
#pragma unroll
  for (int i = 1; i < kMaxRanks; ++i) {  // not all ranks to the same one first
    if (i >= p.ranks) break;
    const int to = (p.rank + i) % p.ranks;
    write_cell(p.cells[to] + cell(p, call, p.rank), data, call);
  }
}

// The block's counter goes on once all of its threads have read it.
__device__ __forceinline__ void count_call(const Peers& p, uint32_t call) {
  __syncthreads();
  if (threadIdx.x == 0) p.calls[blockIdx.x] = call;
}

template <typename Pair>
__device__ __forceinline__ float2 widen(uint32_t bits);
template <>
__device__ __forceinline__ float2 widen<__nv_bfloat162>(uint32_t bits) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&bits));
}
template <>
__device__ __forceinline__ float2 widen<__half2>(uint32_t bits) {
  return __half22float2(*reinterpret_cast<__half2*>(&bits));
}
template <typename Pair>
__device__ __forceinline__ uint32_t narrow(float2 value);
template <>
__device__ __forceinline__ uint32_t narrow<__nv_bfloat162>(float2 value) {
  __nv_bfloat162 pair = __float22bfloat162_rn(value);
  return *reinterpret_cast<uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t narrow<__half2>(float2 value) {
  __half2 pair = __float22half2_rn(value);
  return *reinterpret_cast<uint32_t*>(&pair);
}

// out = (out +) the sum of all ranks' x, in float32, rounded once. Four numbers a thread.
template <typename Pair, bool ADD>
__global__ void __launch_bounds__(kThreads) all_reduce(const __grid_constant__ Peers p, const uint2* x, uint2* out, int count) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  wait_for_inputs();
  start_next();
  const uint32_t call = p.calls[blockIdx.x] + 1;
  if (i < count) {
    const uint2 own = x[i];
    send(p, own, call);
    float2 low = {0.0f, 0.0f}, high = {0.0f, 0.0f};
    if (ADD) {
      const uint2 before = out[i];
      low = widen<Pair>(before.x), high = widen<Pair>(before.y);
    }
    float2 sum_low = {0.0f, 0.0f}, sum_high = {0.0f, 0.0f};
    for (int r = 0; r < p.ranks; ++r) {
      const uint2 part = r == p.rank ? own : read_cell(p.cells[p.rank] + cell(p, call, r), call);
      const float2 a = widen<Pair>(part.x), b = widen<Pair>(part.y);
      sum_low.x += a.x, sum_low.y += a.y, sum_high.x += b.x, sum_high.y += b.y;
    }
    low.x += sum_low.x, low.y += sum_low.y, high.x += sum_high.x, high.y += sum_high.y;
    out[i] = make_uint2(narrow<Pair>(low), narrow<Pair>(high));
  }
  count_call(p, call);
}

// The index that goes with the largest value over all ranks; of equals, the lowest rank's.
__global__ void __launch_bounds__(kThreads) best_index(const __grid_constant__ Peers p, const float* values, const int64_t* indices,
                                                       int64_t* out, int count) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  wait_for_inputs();
  start_next();
  const uint32_t call = p.calls[blockIdx.x] + 1;
  if (i < count) {
    const uint2 own = make_uint2(__float_as_uint(values[i]), (uint32_t)indices[i]);
    send(p, own, call);
    float best = 0.0f;
    uint32_t where = 0;
    for (int r = 0; r < p.ranks; ++r) {
      const uint2 part = r == p.rank ? own : read_cell(p.cells[p.rank] + cell(p, call, r), call);
      const float value = __uint_as_float(part.x);
      if (r == 0 || value > best) best = value, where = part.y;
    }
    out[i] = where;
  }
  count_call(p, call);
}

int launch(const void* kernel, int count, void** arguments, int device, int dependent, cudaStream_t stream) {
  int current = -1;  // this library's runtime is its own: it may not know what torch's has set
  if (cudaGetDevice(&current) != cudaSuccess || current != device) cudaSetDevice(device);
  cudaLaunchAttribute attributes[1];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((count + kThreads - 1) / kThreads, 1, 1);
  config.blockDim = dim3(kThreads, 1, 1);
  config.stream = stream;
  config.attrs = attributes;
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  config.numAttrs = dependent;
  return static_cast<int>(cudaLaunchKernelExC(&config, kernel, arguments));
}

Peers make_peers(const int64_t* cells, void* calls, int rank, int ranks) {
  Peers p = {};
  for (int r = 0; r < ranks; ++r) p.cells[r] = reinterpret_cast<uint4*>(cells[r]);
  p.calls = static_cast<uint32_t*>(calls), p.rank = rank, p.ranks = ranks;
  return p;
}

}  // namespace

// count: of groups of 4 numbers; type: 0 bfloat16, 1 float16; add: to out, else out is overwritten; x and out 8-byte aligned. The memory behind
// cells (zero at first) holds 2 * ranks * 256 cells of 16 bytes for each 256 of count, calls (zero at first) one number.
// dependent: 1 with programmatic dependent launch. Returns a CUDA error code.
extern "C" int peers_all_reduce(const int64_t* cells, void* calls, int rank, int ranks, const void* x, void* out, int count,
                                int type, int add, int dependent, int device, cudaStream_t stream) {
  const Peers p = make_peers(cells, calls, rank, ranks);
  void* arguments[] = {(void*)&p, &x, &out, &count};
  const void* kernel = type == 0 ? (add ? (const void*)all_reduce<__nv_bfloat162, true> : (const void*)all_reduce<__nv_bfloat162, false>)
                                 : (add ? (const void*)all_reduce<__half2, true> : (const void*)all_reduce<__half2, false>);
  return launch(kernel, count, arguments, device, dependent, stream);
}

// values float32, indices int64 (below 2**32), out int64, all [count].
extern "C" int peers_best_index(const int64_t* cells, void* calls, int rank, int ranks, const void* values, const void* indices,
                                void* out, int count, int dependent, int device, cudaStream_t stream) {
  const Peers p = make_peers(cells, calls, rank, ranks);
  void* arguments[] = {(void*)&p, &values, &indices, &out, &count};
  return launch((const void*)best_index, count, arguments, device, dependent, stream);
}
