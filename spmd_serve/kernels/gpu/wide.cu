// Linear layers for up to 64 tokens, bound by the weights' bytes: out = act(x @ w.T + bias), or parts of the sums.
//
// The tokens are the 64-row operand of Hopper's wgmma and the weight's rows its wide one, so that a block can take as many
// rows as make its share of the weight equal to all others'. One thread of a block asks the copy engine for the tiles (of x
// and w, through tensor maps: rows of 128 bytes, swizzled as wgmma wants them, and zeros beyond an edge), a warpgroup
// multiplies. The weights' first tiles are asked for before the kernel before this one has ended (programmatic dependent
// launch): with some 100 KB of them in flight, that is the whole share of a block in a small layer.
//
// Each block reads all tokens, from L2, and with few rows a block those are more bytes than its weights. So a layer's columns
// may be split over blocks, which have more rows then. Either a cluster's blocks share them, which sum over distributed shared
// memory, or each writes its float32 sums, which the next kernel adds. Both add in order: the same bits every time.

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
constexpr int kMaxRows = 256, kMaxGatedRows = 136;  // of a tile of w; of the gate
constexpr int kProduct = 256;     // rows of w that one wgmma takes at most
constexpr int kSharedBytes = 227 * 1024;
constexpr int kGroupBytes = 128 * 16;  // four sums of each thread of the warpgroup: 8 rows of w

struct Arguments {
  const __nv_bfloat16* bias;  // as many as rows of w, or null
  void* out;                  // bfloat16 [tokens, features], or float32 [splits, tokens, features]
  int tokens, features, steps;
  int tile_rows;              // of w in a tile (in a gated layer, of the gate)
  int splits, stages;
  int stage_bytes;            // of shared memory
  int activation;             // 0 none, 1 silu, 2 gelu_tanh: rows of w come in two halves, gate and up
  int parts;                  // out is float32
  int shared;                 // the splits of a tile are a cluster, and share its rows out in groups of 8
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

// In the block `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// The bytes count for the barrier, which lies in the same block as `to`.
__device__ __forceinline__ void cluster_store(uint32_t to, const float* four, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(four[0]),
               "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_shared4(uint32_t at, const float* four) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]) : "memory");
}

__device__ __forceinline__ float4 load_shared4(uint32_t at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
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

// Operands of a product with N rows of w: their names, and the N / 2 sums of a thread that they stand for.
#define R4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define R8(i) R4(i), R4(i + 4)
#define L8 "%0,%1,%2,%3"
#define V8 R4(0)
#define L16 L8 ",%4,%5,%6,%7"
#define V16 V8, R4(4)
#define L24 L16 ",%8,%9,%10,%11"
#define V24 V16, R4(8)
#define L32 L24 ",%12,%13,%14,%15"
#define V32 V24, R4(12)
#define L40 L32 ",%16,%17,%18,%19"
#define V40 V32, R4(16)
#define L48 L40 ",%20,%21,%22,%23"
#define V48 V40, R4(20)
#define L56 L48 ",%24,%25,%26,%27"
#define V56 V48, R4(24)
#define L64 L56 ",%28,%29,%30,%31"
#define V64 V56, R4(28)
#define L72 L64 ",%32,%33,%34,%35"
#define V72 V64, R4(32)
#define L80 L72 ",%36,%37,%38,%39"
#define V80 V72, R4(36)
#define L88 L80 ",%40,%41,%42,%43"
#define V88 V80, R4(40)
#define L96 L88 ",%44,%45,%46,%47"
#define V96 V88, R4(44)
#define L104 L96 ",%48,%49,%50,%51"
#define V104 V96, R4(48)
#define L112 L104 ",%52,%53,%54,%55"
#define V112 V104, R4(52)
#define L120 L112 ",%56,%57,%58,%59"
#define V120 V112, R4(56)
#define L128 L120 ",%60,%61,%62,%63"
#define V128 V120, R4(60)
#define L136 L128 ",%64,%65,%66,%67"
#define V136 V128, R4(64)
#define L144 L136 ",%68,%69,%70,%71"
#define V144 V136, R4(68)
#define L160 L144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define V160 V144, R8(72)
#define L176 L160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define V176 V160, R8(80)
#define L192 L176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define V192 V176, R8(88)
#define L208 L192 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define V208 V192, R8(96)
#define L224 L208 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define V224 V208, R8(104)
#define L240 L224 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define V240 V224, R8(112)
#define L256 L240 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define V256 V240, R8(120)

// c += a @ b.T: a [64, 16] and b [N, 16], each by its description; `add` 0: c is overwritten.
template <int N>
__device__ void multiply(float (&c)[N / 2], uint64_t a, uint64_t b, int add);

#define MULTIPLY(N, A, B, ADD)                                                                                                 \
  template <>                                                                                                                 \
  __device__ __forceinline__ void multiply<N>(float (&c)[N / 2], uint64_t a, uint64_t b, int add) {                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" L##N "}, " A ", " B ", p, 1, 1, 0, 0;\n}\n"      \
                 : V##N                                                                                                       \
                 : "l"(a), "l"(b), "r"(add));                                                                                 \
  }
MULTIPLY(16, "%8", "%9", "%10")
MULTIPLY(24, "%12", "%13", "%14")
MULTIPLY(32, "%16", "%17", "%18")
MULTIPLY(40, "%20", "%21", "%22")
MULTIPLY(48, "%24", "%25", "%26")
MULTIPLY(56, "%28", "%29", "%30")
MULTIPLY(64, "%32", "%33", "%34")
MULTIPLY(72, "%36", "%37", "%38")
MULTIPLY(80, "%40", "%41", "%42")
MULTIPLY(88, "%44", "%45", "%46")
MULTIPLY(96, "%48", "%49", "%50")
MULTIPLY(104, "%52", "%53", "%54")
MULTIPLY(112, "%56", "%57", "%58")
MULTIPLY(120, "%60", "%61", "%62")
MULTIPLY(128, "%64", "%65", "%66")
MULTIPLY(136, "%68", "%69", "%70")
MULTIPLY(144, "%72", "%73", "%74")
MULTIPLY(160, "%80", "%81", "%82")
MULTIPLY(176, "%88", "%89", "%90")
MULTIPLY(192, "%96", "%97", "%98")
MULTIPLY(208, "%104", "%105", "%106")
MULTIPLY(224, "%112", "%113", "%114")
MULTIPLY(240, "%120", "%121", "%122")
MULTIPLY(256, "%128", "%129", "%130")

// c += a @ b.T for N rows of w, and where there are too many for one product in halves. The same for N / 2 sums of a thread.
template <int N>
__device__ __forceinline__ void multiply_all(float (&c)[N / 2], uint64_t a, uint64_t b, int add) {
  if constexpr (N <= kProduct) {
    multiply<N>(c, a, b, add);
  } else {
    constexpr int kHalf = N / 2;
    multiply<kHalf>(reinterpret_cast<float(&)[kHalf / 2]>(c[0]), a, b, add);
    multiply<kHalf>(reinterpret_cast<float(&)[kHalf / 2]>(c[kHalf / 2]), a, b + (kHalf * kRowBytes >> 4), add);
  }
}

__device__ __forceinline__ float activate(float gate, int kind) {
  float exponent = kind == 1 ? -gate : -1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + __expf(exponent));
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// The blocks of a cluster share a tile's rows out in groups of 8: each gets all blocks' sums of every splits-th group, in shared memory
// at `received`: [sender][owned group][half][thread].
__host__ __device__ constexpr int owned_groups(int n, int splits) { return (n / 8 + splits - 1) / splits; }

template <int N, int HALVES>
__device__ __forceinline__ void share_sums(const float (&sums)[HALVES * N / 2], int split, int splits, uint32_t received, uint32_t all_received) {
  int owner = 0;
  uint32_t at = received + split * owned_groups(N, splits) * HALVES * kGroupBytes + threadIdx.x * 16;
#pragma unroll
  for (int group = 0; group < N / 8; ++group) {
    const uint32_t to = cluster_address(at, owner), barrier = cluster_address(all_received, owner);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) cluster_store(to + half * kGroupBytes, sums + half * N / 2 + 4 * group, barrier);
    if (++owner == splits) owner = 0, at += HALVES * kGroupBytes;
  }
  wait(all_received, 0);
}

// Without a cluster: a sender alone, and the stages' memory, which all warps are done with.
template <int N, int HALVES>
__device__ __forceinline__ void keep_sums(const float (&sums)[HALVES * N / 2], uint32_t received) {
  asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll
  for (int group = 0; group < N / 8; ++group)
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
      store_shared4(received + (group * HALVES + half) * kGroupBytes + threadIdx.x * 16, sums + half * N / 2 + 4 * group);
}

// This thread's four sums over all senders, in their order: the same bits every time.
__device__ __forceinline__ float4 sum_of(uint32_t at, int senders, int sender_bytes) {
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int sender = 0; sender < senders; ++sender, at += sender_bytes) {
    const float4 part = load_shared4(at);
    total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
  }
  return total;
}

// N: tile_rows, rounded up to the next 8: what is multiplied beyond a tile costs power, and so the clock of the whole chip.
// A block has one tile, or its part of the columns of one.
template <int N, bool GATED>
__global__ void __launch_bounds__(kThreads, 1)
    wide(const Arguments a, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map) {
  constexpr int kHalves = GATED ? 2 : 1, kWide = kHalves * N;  // gate and up lie one after the other, and are one product
  extern __shared__ uint8_t dynamic[];
  __shared__ __align__(8) uint64_t barriers[2 * kMaxStages + 1];
  const uint32_t stages = (shared_address(dynamic) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kMaxStages, all_received = empty + 8 * kMaxStages;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int split = static_cast<int>(blockIdx.x) % a.splits, first_row = static_cast<int>(blockIdx.x) / a.splits * a.tile_rows;
  const int first_step = split * a.steps / a.splits, steps = (split + 1) * a.steps / a.splits - first_step;
  const int senders = a.shared ? a.splits : 1, first_group = a.shared ? split : 0;
  const int sender_bytes = owned_groups(N, senders) * kHalves * kGroupBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, 4);
    init_barrier(all_received, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (a.shared) expect_bytes(all_received, (N / 8 - first_group + senders - 1) / senders * senders * kHalves * kGroupBytes);
  }
  __syncthreads();
  if (a.shared) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");

  if (warp == 4) {
    if (lane == 0) {
      prefetch_map(&w_map), prefetch_map(&x_map);
      uint64_t once, kept;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(kept));
      const int bytes = kTokenBytes + kHalves * a.tile_rows * kRowBytes;
      // Twice through the first round of stages: the weights before the wait, the tokens after it.
      for (int pass = 0; pass < 2; ++pass) {
        for (int step = 0, stage = 0, round = 0; step < steps; ++step) {
          if (pass == 0 && round > 0) break;
          const int column = (first_step + step) * kColumns;
          const uint32_t barrier = full + 8 * stage, to = stages + stage * a.stage_bytes;
          if (round > 0) wait(empty + 8 * stage, (round - 1) & 1);
          if (pass == 0 || round > 0) {
            expect_bytes(barrier, bytes);
            copy_tile(to + kTokenBytes, &w_map, column, first_row, barrier, once);
            if (GATED) copy_tile(to + kTokenBytes + N * kRowBytes, &w_map, column, a.features + first_row, barrier, once);
          }
          if (pass == 1) copy_tile(to, &x_map, column, 0, barrier, kept);
          if (++stage == a.stages) stage = 0, ++round;
        }
        if (pass == 0) {
          asm volatile("griddepcontrol.wait;" ::: "memory");
          asm volatile("griddepcontrol.launch_dependents;");
        }
      }
    }
    return;
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float sums[kWide / 2];
  for (int step = 0, stage = 0, parity = 0; step < steps; ++step) {
    wait(full + 8 * stage, parity);
    const uint32_t at = stages + stage * a.stage_bytes;
    const uint64_t tokens = describe(at), rows = describe(at + kTokenBytes);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) multiply_all<kWide>(sums, tokens + 2 * k, rows + 2 * k, step + k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the step before is done with its stage
    if (lane == 0 && step > 0) arrive(empty + 8 * (stage == 0 ? a.stages - 1 : stage - 1));
    if (++stage == a.stages) stage = 0, parity ^= 1;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");

  // Through shared memory, which a loop can index: unrolled over registers the code would be too long for the instruction cache.
  const uint32_t received = a.shared ? stages + a.stages * a.stage_bytes : stages;
  if (a.shared) {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all blocks have set up their barriers
    share_sums<N, kHalves>(sums, split, senders, received, all_received);
  } else {
    keep_sums<N, kHalves>(sums, received);
  }
  const int rows_here = min(a.tile_rows, a.features - first_row), token0 = warp * 16 + (lane >> 2);
  const size_t first_out = a.parts ? static_cast<size_t>(split) * a.tokens * a.features : 0;
  uint32_t at = received + threadIdx.x * 16;
#pragma unroll 1
  for (int group = first_group; group < N / 8; group += senders, at += kHalves * kGroupBytes) {
    const int local = group * 8 + (lane & 3) * 2, column = first_row + local;
    if (local >= rows_here) break;
    const float4 four = sum_of(at, senders, sender_bytes), up = GATED ? sum_of(at + kGroupBytes, senders, sender_bytes) : four;
    float2 bias = {0.0f, 0.0f}, up_bias = {0.0f, 0.0f};
    if (a.bias != nullptr) {
      bias = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(a.bias + column));
      if (GATED) up_bias = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(a.bias + a.features + column));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = token0 + 8 * i;
      if (token >= a.tokens) continue;
      float2 value = {(i == 0 ? four.x : four.z) + bias.x, (i == 0 ? four.y : four.w) + bias.y};
      if (GATED) {
        value.x = activate(value.x, a.activation) * ((i == 0 ? up.x : up.z) + up_bias.x);
        value.y = activate(value.y, a.activation) * ((i == 0 ? up.y : up.w) + up_bias.y);
      }
      const size_t to = first_out + static_cast<size_t>(token) * a.features + column;
      if (a.parts) *reinterpret_cast<float2*>(static_cast<float*>(a.out) + to) = value;
      else *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.out) + to) = __floats2bfloat162_rn(value.x, value.y);
    }
  }
}

// ---- its launch -----------------------------------------------------------------------------------------------------

using Kernel = void (*)(const Arguments, const CUtensorMap, const CUtensorMap);

// Up to what one product takes there is one of any multiple of 8 rows to 128, and of 16 beyond.
constexpr int whole_rows(int rows, bool gated) { return rows <= 16 ? 16 : gated || rows <= 128 ? (rows + 7) / 8 * 8 : (rows + 15) / 16 * 16; }

template <bool GATED, int N = 16>
Kernel pick(int n) {
  if constexpr (N > (GATED ? kMaxGatedRows : kMaxRows)) return nullptr;
  else return n <= N ? wide<N, GATED> : pick<GATED, whole_rows(N + 1, GATED)>(n);
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

// Launches on `stream`; dependent: with programmatic dependent launch, and the next kernel may start when this one has its input.
// features and tile_rows must be even, columns and x_stride multiples of 8, all pointers 16-byte aligned. room: bytes of shared
// memory a block may take. Returns a CUDA error code; -1: the shape does not fit.
extern "C" int wide_linear(const void* x, const void* w, const void* bias, void* out, int tokens, int features, int columns, int x_stride, int activation,
                           int parts, int tile_rows, int splits, int room, int dependent, int device, cudaStream_t stream) {
  int current = -1;  // this library's runtime is its own: it may not know what torch's has set
  if (cudaGetDevice(&current) != cudaSuccess || current != device) cudaSetDevice(device);
  const bool gated = activation != 0;
  const int halves = gated ? 2 : 1;
  const int n = whole_rows(tile_rows, gated);
  if (tokens > kTokens || features % 2 || tile_rows % 2 || columns % 8 || x_stride % 8) return -1;
  const Kernel kernel = gated ? pick<true>(n) : pick<false>(n);
  if (kernel == nullptr) return -1;
  Arguments a;
  a.bias = static_cast<const __nv_bfloat16*>(bias), a.out = out;
  a.tokens = tokens, a.features = features, a.steps = (columns + kColumns - 1) / kColumns;
  a.tile_rows = tile_rows, a.splits = splits;
  a.activation = activation, a.parts = parts;
  a.shared = splits > 1 && !parts;
  a.stage_bytes = kTokenBytes + halves * n * kRowBytes;
  // In front the dynamic memory may have to be aligned; behind the stages come a cluster's sums.
  const int slack = 1024 + (a.shared ? splits * owned_groups(n, splits) * halves * kGroupBytes : 0);
  const int space = (room < kSharedBytes - 256 ? room : kSharedBytes - 256) - slack;
  a.stages = space / a.stage_bytes < kMaxStages ? space / a.stage_bytes : kMaxStages;
  if (a.stages < 2 || splits > a.steps || (a.shared && splits > 8)) return -1;
  CUtensorMap x_map, w_map;
  if (!make_map(&x_map, x, tokens, columns, x_stride, kTokens) || !make_map(&w_map, w, halves * features, columns, columns, tile_rows)) return -1;
  const int bytes = a.stages * a.stage_bytes + slack;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = a.shared ? splits : 1, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((features + tile_rows - 1) / tile_rows * splits, 1, 1);
  config.blockDim = dim3(kThreads, 1, 1);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, a, x_map, w_map));
}
