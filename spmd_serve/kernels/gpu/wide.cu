// Linear layers for up to 64 tokens, bound by the weights' bytes: out = act(x @ w.T + bias), or parts of the sums.
//
// The tokens are the 64-row operand of Hopper's wgmma and the weight's rows its wide one, so that a block can take as many
// rows as make its share of the weight equal to all others'. One thread of a block asks the copy engine for the tiles (of x
// and w, through tensor maps: rows of 128 bytes, swizzled as wgmma wants them, and zeros beyond an edge), a warpgroup
// multiplies. The weights' first tiles are asked for before the kernel before this one has ended (programmatic dependent
// launch): with some 100 KB of them in flight, that is the whole share of a block in a small layer. A narrow and long
// layer's columns are split over blocks: each writes its float32 sums, which the next kernel adds in order.

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kColumns = 64;      // of a step: 128 bytes, what the swizzle takes
constexpr int kRowBytes = 2 * kColumns;
constexpr int kTokens = 64;
constexpr int kTokenBytes = kTokens * kRowBytes;
constexpr int kMaxStages = 16;
constexpr int kThreads = 160;     // a warpgroup that multiplies, a warp that copies
constexpr int kSharedBytes = 227 * 1024;

struct Arguments {
  const __nv_bfloat16* bias;  // as many as rows of w, or null
  void* out;                  // bfloat16 [tokens, features], or float32 [splits, tokens, features]
  int tokens, features, steps;
  int tile_rows;              // of w in a tile (in a gated layer, of the gate)
  int tiles, splits, stages;
  int half_bytes, stage_bytes;  // shared memory of a tile of one half of w, and of a stage
  int activation;             // 0 none, 1 silu, 2 gelu_tanh: rows of w come in two halves, gate and up
  int parts;                  // out is float32
  int early;                  // the next kernel may start when this one has its input
};

// ---- barriers and copies --------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra AGAIN;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Columns from `column` of the rows from `row`, as many as the map's box has.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// ---- products -------------------------------------------------------------------------------------------------------

// Rows of 128 bytes, swizzled in groups of 8 (1024 bytes apart).
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#define R4(v, i) "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3])
#define R16(v, i) R4(v, i), R4(v, i + 4), R4(v, i + 8), R4(v, i + 12)

// c += a @ b.T: a [64, 16] and b [64, 16], each by its description; `add` 0: c is overwritten.
__device__ __forceinline__ void multiply(float (&c)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}\n"
      : R16(c, 0), R16(c, 16)
      : "l"(a), "l"(b), "r"(add));
}

// The same for 32 rows of b.
__device__ __forceinline__ void multiply(float (&c)[16], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "%16, %17, p, 1, 1, 0, 0;\n}\n"
      : R16(c, 0)
      : "l"(a), "l"(b), "r"(add));
}

// The sums of the tokens and PIECES * 32 rows, over a warpgroup. A thread has, of each 8 rows, two neighbours of two tokens.
template <int PIECES>
struct Sums {
  float pairs[PIECES / 2 > 0 ? PIECES / 2 : 1][32];
  float last[16];

  __device__ __forceinline__ void add(uint64_t a, uint64_t b, int add) {
#pragma unroll
    for (int i = 0; i < PIECES / 2; ++i) multiply(pairs[i], a, b + i * (64 * kRowBytes >> 4), add);
    if (PIECES % 2) multiply(last, a, b + (PIECES / 2) * (64 * kRowBytes >> 4), add);
  }

  __device__ __forceinline__ float at(int group, int i) const {  // constants, or these are not registers
    return group < PIECES / 2 * 8 ? pairs[group / 8][group % 8 * 4 + i] : last[group % 8 * 4 + i];
  }
};

__device__ __forceinline__ float activate(float gate, int kind) {
  float exponent = kind == 1 ? -gate : -1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + __expf(exponent));
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <int PIECES, bool GATED>
__global__ void __launch_bounds__(kThreads, 1)
    wide(const Arguments a, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map) {
  extern __shared__ uint8_t dynamic[];
  __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];
  const uint32_t stages = (shared_address(dynamic) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kMaxStages;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int items = a.tiles * a.splits;

  if (warp == 4) {
    if (lane == 0) {
      prefetch_map(&w_map), prefetch_map(&x_map);
      uint64_t once, kept;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(kept));
      const int bytes = kTokenBytes + (GATED ? 2 : 1) * a.tile_rows * kRowBytes;
      // Twice through the first round of stages: the weights before the wait, the tokens after it.
      for (int pass = 0; pass < 2; ++pass) {
        int stage = 0, round = 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
          const int row = item / a.splits * a.tile_rows, split = item % a.splits;
          const int last = (split + 1) * a.steps / a.splits;
          for (int step = split * a.steps / a.splits; step < last; ++step) {
            if (pass == 0 && round > 0) break;
            const int column = step * kColumns;
            const uint32_t barrier = full + 8 * stage, to = stages + stage * a.stage_bytes;
            if (round > 0) wait(empty + 8 * stage, (round - 1) & 1);
            if (pass == 0 || round > 0) {
              expect_bytes(barrier, bytes);
              copy_tile(to + kTokenBytes, &w_map, column, row, barrier, once);
              if (GATED) copy_tile(to + kTokenBytes + a.half_bytes, &w_map, column, a.features + row, barrier, once);
            }
            if (pass == 1) copy_tile(to, &x_map, column, 0, barrier, kept);
            if (++stage == a.stages) stage = 0, ++round;
          }
        }
        if (pass == 0) {
          asm volatile("griddepcontrol.wait;" ::: "memory");
          if (a.early) asm volatile("griddepcontrol.launch_dependents;");
        }
      }
    }
  } else {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int token0 = warp * 16 + (lane >> 2), column0 = (lane & 3) * 2;
    int stage = 0, parity = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const int first_row = item / a.splits * a.tile_rows, split = item % a.splits;
      const int steps = (split + 1) * a.steps / a.splits - split * a.steps / a.splits;
      Sums<PIECES> sums, up;
      for (int step = 0; step < steps; ++step) {
        wait(full + 8 * stage, parity);
        const uint32_t at = stages + stage * a.stage_bytes;
        const uint64_t tokens = describe(at), rows = describe(at + kTokenBytes);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < kColumns / 16; ++k) {
          sums.add(tokens + 2 * k, rows + 2 * k, step + k);
          if (GATED) up.add(tokens + 2 * k, rows + 2 * k + (a.half_bytes >> 4), step + k);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) arrive(empty + 8 * stage);
        if (++stage == a.stages) stage = 0, parity ^= 1;
      }
      const int rows_here = min(a.tile_rows, a.features - first_row);
#pragma unroll
      for (int group = 0; group < PIECES * 4; ++group) {
        const int local = group * 8 + column0, column = first_row + local;
        if (local >= rows_here) continue;
        float2 bias = {0.0f, 0.0f}, up_bias = {0.0f, 0.0f};
        if (a.bias != nullptr) {
          bias = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(a.bias + column));
          if (GATED) up_bias = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(a.bias + a.features + column));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int token = token0 + 8 * i;
          if (token >= a.tokens) continue;
          float2 value = {sums.at(group, 2 * i) + bias.x, sums.at(group, 2 * i + 1) + bias.y};
          if (GATED) {
            value.x = activate(value.x, a.activation) * (up.at(group, 2 * i) + up_bias.x);
            value.y = activate(value.y, a.activation) * (up.at(group, 2 * i + 1) + up_bias.y);
          }
          const size_t to = (static_cast<size_t>(split) * a.tokens + token) * a.features + column;
          if (a.parts) *reinterpret_cast<float2*>(static_cast<float*>(a.out) + to) = value;
          else *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.out) + to) = __floats2bfloat162_rn(value.x, value.y);
        }
      }
    }
  }
}

// ---- its launch -----------------------------------------------------------------------------------------------------

using Kernel = void (*)(const Arguments, const CUtensorMap, const CUtensorMap);

template <bool GATED>
Kernel pick(int pieces) {
  switch (pieces) {
    case 1: return wide<1, GATED>;
    case 2: return wide<2, GATED>;
    case 3: return wide<3, GATED>;
    case 4: return wide<4, GATED>;
    case 5: return wide<5, GATED>;
  }
  return nullptr;
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) != cudaSuccess) return nullptr;
#else
  if (cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result) != cudaSuccess) return nullptr;
#endif
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
}

bool make_map(CUtensorMap* map, const void* at, int rows, int columns, int stride, int box_rows) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)}, strides[] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[] = {kColumns, static_cast<cuuint32_t>(box_rows)}, every[] = {1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(at), sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

// Launches on `stream`; dependent: 0 no programmatic dependent launch, 1 yes, 2 the next kernel may start early. features and tile_rows must be
// even, columns and x_stride multiples of 8, all pointers 16-byte aligned. room: bytes of shared memory a block may take.
// Returns a CUDA error code; -1: the shape does not fit.
extern "C" int wide_linear(const void* x, const void* w, const void* bias, void* out, int tokens, int features, int columns, int x_stride, int activation,
                           int parts, int tile_rows, int splits, int room, int dependent, int device, cudaStream_t stream) {
  int current = -1;  // this library's runtime is its own: it may not know what torch's has set
  if (cudaGetDevice(&current) != cudaSuccess || current != device) cudaSetDevice(device);
  const bool gated = activation != 0;
  const int halves = gated ? 2 : 1;
  const int pieces = (tile_rows + 31) / 32;
  if (tokens > kTokens || features % 2 || tile_rows % 2 || columns % 8 || x_stride % 8) return -1;
  const Kernel kernel = gated ? pick<true>(pieces) : pick<false>(pieces);
  if (kernel == nullptr) return -1;
  Arguments a;
  a.bias = static_cast<const __nv_bfloat16*>(bias), a.out = out;
  a.tokens = tokens, a.features = features, a.steps = (columns + kColumns - 1) / kColumns;
  a.tile_rows = tile_rows, a.tiles = (features + tile_rows - 1) / tile_rows, a.splits = splits;
  a.activation = activation, a.parts = parts, a.early = dependent == 2;
  // The products of rows beyond a tile's are not used: they may be anything that is in shared memory, as the slack at its end.
  a.half_bytes = (tile_rows + 7) / 8 * 8 * kRowBytes, a.stage_bytes = kTokenBytes + halves * a.half_bytes;
  const int slack = pieces * 32 * kRowBytes - a.half_bytes + 1024;
  const int space = (room < kSharedBytes - 256 ? room : kSharedBytes - 256) - slack;
  a.stages = space / a.stage_bytes < kMaxStages ? space / a.stage_bytes : kMaxStages;
  if (a.stages < 2 || splits > a.steps || (splits > 1 && !parts)) return -1;
  CUtensorMap x_map, w_map;
  if (!make_map(&x_map, x, tokens, columns, x_stride, kTokens) || !make_map(&w_map, w, halves * features, columns, columns, tile_rows)) return -1;
  const int bytes = a.stages * a.stage_bytes + slack;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  int multiprocessors = 0, blocks = 0;
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  const int items = a.tiles * splits, resident = multiprocessors * blocks;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(items < resident ? items : resident, 1, 1);
  config.blockDim = dim3(kThreads, 1, 1);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent > 0 ? 1 : 0;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, a, x_map, w_map));
}
