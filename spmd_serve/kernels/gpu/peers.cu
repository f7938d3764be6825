// Sums and choices over the GPUs of one host for small tensors: each rank writes its part into every other rank's memory.
//
// What is written carries the number of the call, so a reader that sees it has the data too: there is no barrier, no flag
// that must follow the data, and one trip over the link is all the time that passes. Two forms:
//   cells  of 16 bytes, 8 of them data, words 1 and 3 the number: a store of 16 bytes arrives in halves of 8 that are whole in themselves.
//   lines  of 128 bytes, 120 of them data: 8 threads of a warp write one together, and over NVLink it arrives whole.
// A block's worth of either has a place of its own, for two calls in turn, and counts its calls itself. A place is written again
// two calls later: by then its reader is done, since the writer has its answer to the call between, which the reader
// sent after its own kernel before that had ended. Cells and lines do not share memory: a line's data could look like a number.
//
// All ranks make the same calls in the same order on one stream each. Sums are in rank order, so all hold the same bits.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256, kMaxRanks = 8, kResident = 6;  // blocks of a multiprocessor at once
constexpr int kMaxPlaces = 640;  // blocks that wait for others must all be able to run: 108 multiprocessors are enough
constexpr int kMaxAddBlocks = 1056;  // eight a multiprocessor
constexpr int kLineThreads = 8, kLineGroups = 15, kBlockGroups = kThreads / kLineThreads * kLineGroups;  // groups of 8 bytes

struct Peers {
  uint4* cells[kMaxRanks];  // each rank's memory: [place][call parity][writer][thread]
  uint32_t* calls;          // [place], of this rank
  int rank, ranks;
  int pass_on;              // the next kernel may start before this one's inputs are there
};

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void begin(const Peers& p) {
  if (p.pass_on) start_next();
  wait_for_inputs();
  start_next();  // does nothing the second time
}

__device__ __forceinline__ void write16(uint4* at, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 read16(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

// This thread's 16 bytes from `writer` at a place, in the memory of the rank that reads.
__device__ __forceinline__ size_t at(const Peers& p, int place, uint32_t call, int writer) {
  return ((size_t)(place * 2 + (call & 1)) * p.ranks + writer) * kThreads + threadIdx.x;
}

__device__ __forceinline__ void send(const Peers& p, int place, uint32_t call, uint4 what) {
#pragma unroll
  for (int i = 1; i < kMaxRanks; ++i) {  // not all ranks to the same one first
    if (i >= p.ranks) break;
    const int to = (p.rank + i) % p.ranks;
    write16(p.cells[to] + at(p, place, call, p.rank), what);
  }
}

__device__ __forceinline__ uint2 read_cell(const Peers& p, int place, uint32_t call, int writer) {
  uint4 v;
  do v = read16(p.cells[p.rank] + at(p, place, call, writer));
  while (v.y != call || v.w != call);
  return make_uint2(v.x, v.z);
}

// The whole warp's.
__device__ __forceinline__ uint4 read_lines(const Peers& p, int place, uint32_t call, int writer) {
  const bool has_number = threadIdx.x % kLineThreads == kLineThreads - 1;
  uint4 v;
  do v = read16(p.cells[p.rank] + at(p, place, call, writer));
  while (__any_sync(0xffffffffu, has_number && (v.z != call || v.w != call)));
  return v;
}

// The place's counter goes on once all of the block's threads have read it.
__device__ __forceinline__ void count_call(const Peers& p, int place, uint32_t call) {
  __syncthreads();
  if (threadIdx.x == 0) p.calls[place] = call;
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

// Four numbers in float32.
template <typename Pair>
struct Four {
  float2 low = {0.0f, 0.0f}, high = {0.0f, 0.0f};

  __device__ __forceinline__ void add(uint32_t first, uint32_t second) {
    const float2 a = widen<Pair>(first), b = widen<Pair>(second);
    low.x += a.x, low.y += a.y, high.x += b.x, high.y += b.y;
  }
  // before + this, rounded once.
  __device__ __forceinline__ uint2 rounded(const Four& before) const {
    return make_uint2(narrow<Pair>({before.low.x + low.x, before.low.y + low.y}),
                      narrow<Pair>({before.high.x + high.x, before.high.y + high.y}));
  }
};

// out = (out +) the sum of all ranks' x, in float32, rounded once. count: of groups of four numbers, one a thread.
template <typename Pair, bool ADD>
__global__ void __launch_bounds__(kThreads) all_reduce(const __grid_constant__ Peers p, const uint2* x, uint2* out, int count) {
  const int place = blockIdx.x, i = place * kThreads + threadIdx.x;
  begin(p);
  const uint32_t call = p.calls[place] + 1;
  if (i < count) {
    const uint2 own = x[i];
    send(p, place, call, make_uint4(own.x, call, own.y, call));
    Four<Pair> before, sum;
    if (ADD) {
      const uint2 old = out[i];
      before.add(old.x, old.y);
    }
    for (int r = 0; r < p.ranks; ++r) {
      const uint2 part = r == p.rank ? own : read_cell(p, place, call, r);
      sum.add(part.x, part.y);
    }
    out[i] = sum.rounded(before);
  }
  count_call(p, place, call);
}

// The same in lines, two groups a thread: for larger tensors, whose bytes count. A block goes on to the next part of the tensor with its
// next call; a warp writes a place again only after it has read the other ranks' answer to its call between, as above.
template <typename Pair, bool ADD>
__global__ void __launch_bounds__(kThreads, kResident) all_reduce_lines(const __grid_constant__ Peers p, const uint2* x, uint2* out, int count) {
  const int lane = threadIdx.x % kLineThreads, place = blockIdx.x;
  begin(p);
  uint32_t call = p.calls[place];
  for (int part = place; part * kBlockGroups < count; part += gridDim.x) {
    const int first = part * kBlockGroups + threadIdx.x / kLineThreads * kLineGroups + 2 * lane, second = first + 1;
    const bool has_first = first < count, has_second = lane < kLineThreads - 1 && second < count;
    const uint2 nothing = make_uint2(0, 0), a = has_first ? x[first] : nothing, b = has_second ? x[second] : nothing;
    ++call;
    const uint4 own = lane < kLineThreads - 1 ? make_uint4(a.x, a.y, b.x, b.y) : make_uint4(a.x, a.y, call, call);
    send(p, place, call, own);
    Four<Pair> before_a, before_b, sum_a, sum_b;
    if (ADD) {
      const uint2 old_a = has_first ? out[first] : nothing, old_b = has_second ? out[second] : nothing;
      before_a.add(old_a.x, old_a.y), before_b.add(old_b.x, old_b.y);
    }
    for (int r = 0; r < p.ranks; ++r) {
      const uint4 received = r == p.rank ? own : read_lines(p, place, call, r);
      sum_a.add(received.x, received.y), sum_b.add(received.z, received.w);
    }
    if (has_first) out[first] = sum_a.rounded(before_a);
    if (has_second) out[second] = sum_b.rounded(before_b);
  }
  count_call(p, place, call);
}

// The index that goes with the largest value over all ranks; of equals, the lowest rank's.
__global__ void __launch_bounds__(kThreads) best_index(const __grid_constant__ Peers p, const float* values, const int64_t* indices,
                                                       int64_t* out, int count) {
  const int place = blockIdx.x, i = place * kThreads + threadIdx.x;
  begin(p);
  const uint32_t call = p.calls[place] + 1;
  if (i < count) {
    const uint2 own = make_uint2(__float_as_uint(values[i]), (uint32_t)indices[i]);
    send(p, place, call, make_uint4(own.x, call, own.y, call));
    float best = 0.0f;
    uint32_t where = 0;
    for (int r = 0; r < p.ranks; ++r) {
      const uint2 part = r == p.rank ? own : read_cell(p, place, call, r);
      const float value = __uint_as_float(part.x);
      if (r == 0 || value > best) best = value, where = part.y;
    }
    out[i] = where;
  }
  count_call(p, place, call);
}

__device__ __forceinline__ uint32_t acquire(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

// out += the sum of all ranks' parts, as above. Copy engines put the other ranks' parts at `received`, `stride` groups apart, and
// behind each the sum's number into arrived[rank].
template <typename Pair>
__global__ void __launch_bounds__(kThreads) add_copied(const uint4* own, const uint4* received, const uint32_t* arrived, uint32_t number,
                                                       int rank, int ranks, int64_t stride, uint4* out, int count) {
  wait_for_inputs();
  start_next();
  if (threadIdx.x < ranks && threadIdx.x != rank)
    while (acquire(arrived + threadIdx.x) != number) {}
  __syncthreads();
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    Four<Pair> before_a, before_b, sum_a, sum_b;
    const uint4 old = out[i];
    before_a.add(old.x, old.y), before_b.add(old.z, old.w);
    for (int r = 0; r < ranks; ++r) {
      const uint4 part = r == rank ? own[i] : __ldcg(received + r * stride + i);
      sum_a.add(part.x, part.y), sum_b.add(part.z, part.w);
    }
    const uint2 a = sum_a.rounded(before_a), b = sum_b.rounded(before_b);
    out[i] = make_uint4(a.x, a.y, b.x, b.y);
  }
}

int launch(const void* kernel, int blocks, void** arguments, int device, int dependent, cudaStream_t stream) {
  int current = -1;  // this library's runtime is its own: it may not know what torch's has set
  if (cudaGetDevice(&current) != cudaSuccess || current != device) cudaSetDevice(device);
  cudaLaunchAttribute attributes[1];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks, 1, 1);
  config.blockDim = dim3(kThreads, 1, 1);
  config.stream = stream;
  config.attrs = attributes;
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  config.numAttrs = dependent > 0;
  return static_cast<int>(cudaLaunchKernelExC(&config, kernel, arguments));
}

int divide_up(int a, int b) { return (a + b - 1) / b; }

Peers make_peers(const int64_t* cells, void* calls, int rank, int ranks, int dependent) {
  Peers p = {};
  for (int r = 0; r < ranks; ++r) p.cells[r] = reinterpret_cast<uint4*>(cells[r]);
  p.calls = static_cast<uint32_t*>(calls), p.rank = rank, p.ranks = ranks, p.pass_on = dependent > 1;
  return p;
}

template <typename Pair>
const void* pick(bool lines, bool add) {
  if (lines) return add ? (const void*)all_reduce_lines<Pair, true> : (const void*)all_reduce_lines<Pair, false>;
  return add ? (const void*)all_reduce<Pair, true> : (const void*)all_reduce<Pair, false>;
}

}  // namespace

// count: of groups of 4 numbers; type: 0 bfloat16, 1 float16; add: to out, else out is overwritten; x and out 8-byte aligned. `cells` are the
// ranks' memories and `calls` this rank's counters, all zero at first: for each 256 of count (with lines: 480, and for at most 640 of those)
// 2 * ranks * 4096 bytes and one counter. dependent: 1 with programmatic dependent launch, 2 with Peers' pass_on, too. Returns a CUDA error
// code.
extern "C" int peers_all_reduce(const int64_t* cells, void* calls, int rank, int ranks, const void* x, void* out, int count,
                                int type, int add, int lines, int dependent, int device, cudaStream_t stream) {
  const Peers p = make_peers(cells, calls, rank, ranks, dependent);
  void* arguments[] = {(void*)&p, &x, &out, &count};
  const void* kernel = type == 0 ? pick<__nv_bfloat162>(lines, add) : pick<__half2>(lines, add);
  const int places = divide_up(count, lines ? kBlockGroups : kThreads);
  return launch(kernel, lines && places > kMaxPlaces ? kMaxPlaces : places, arguments, device, dependent, stream);
}

// values float32, indices int64 (below 2**32), out int64, all [count].
extern "C" int peers_best_index(const int64_t* cells, void* calls, int rank, int ranks, const void* values, const void* indices,
                                void* out, int count, int dependent, int device, cudaStream_t stream) {
  const Peers p = make_peers(cells, calls, rank, ranks, dependent);
  void* arguments[] = {(void*)&p, &values, &indices, &out, &count};
  return launch((const void*)best_index, divide_up(count, kThreads), arguments, device, dependent, stream);
}

// own, received and out 16-byte aligned, count and stride of groups of 8 numbers. arrived: uint32 [ranks].
extern "C" int peers_add_copied(int rank, int ranks, const void* own, const void* received, const void* arrived, int number, int64_t stride,
                                void* out, int count, int type, int dependent, int device, cudaStream_t stream) {
  void* arguments[] = {&own, &received, &arrived, &number, &rank, &ranks, &stride, &out, &count};
  const void* kernel = type == 0 ? (const void*)add_copied<__nv_bfloat162> : (const void*)add_copied<__half2>;
  const int blocks = divide_up(count, kThreads);
  return launch(kernel, blocks < kMaxAddBlocks ? blocks : kMaxAddBlocks, arguments, device, dependent, stream);
}
