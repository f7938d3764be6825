// Linear layers for up to 16 tokens, bound by the weights' bytes: out = residual + act(norm(x) @ w.T + bias).
//
// A warp owns 16 rows of the weight and a range of its columns. It loads all of that straight into registers, in the
// layout of the tensor cores' A operand and before it waits for the kernel before this one (programmatic dependent
// launch): the weights' bytes are on their way while nothing else can be done. The tokens' columns go through shared
// memory, scaled by the norm's weight; they are the B operand, 8 tokens a tile. The column ranges of a block's warps and
// of a cluster's blocks (distributed shared memory) are summed in a fixed order.
//
// mma.m16n8k16 wants columns 2t, 2t+1, 2t+8, 2t+9 from thread t of a group of four. Which columns these are does not
// matter as long as both operands agree, so thread t takes the 8 columns 8t .. 8t+7 of a group of 32 with one 16-byte
// load: the first four serve the first of two products, the others the second.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

struct Arguments {
  const __nv_bfloat16* x;      // [tokens, >= columns], row stride x_stride
  const __nv_bfloat16* w;      // [features (twice that if gated), columns]
  const __nv_bfloat16* bias;   // as many as rows of w, or null
  const __nv_bfloat16* scale;  // [columns], the norm's, or null
  __nv_bfloat16* out;          // [tokens, features]
  int tokens, features, columns, x_stride;
  float eps;
  int activation;  // 0 none, 1 silu, 2 gelu_tanh: rows of w come in two halves, gate and up
  int add;         // out holds the residual
  int row_warps;   // groups of 16 rows in a block; even if gated, the second half is up's
  int column_warps;
  int early;       // let the next kernel start after the wait
  int x_pitch;     // of a token in shared memory, in elements; 32 modulo 64, so that 16-byte reads have no conflicts
};

constexpr int kMaxThreads = 256;
constexpr int kAhead = 4;

__device__ __forceinline__ uint32_t cluster_address(const void* shared, uint32_t rank) {
  uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(shared)), remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
}

__device__ __forceinline__ float2 load_cluster2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float load_cluster(uint32_t address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_weights(const __nv_bfloat16* at) {  // read once: do not keep in L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

__device__ __forceinline__ float activate(float gate, int kind) {
  float exponent = kind == 1 ? -gate : -1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + __expf(exponent));
}

// The 8 values of v times those of s, and the sum of squares of v added to `squares`.
__device__ __forceinline__ uint4 scaled(uint4 v, uint4 s, float& squares) {
  uint4 out;
  const __nv_bfloat162* a = reinterpret_cast<const __nv_bfloat162*>(&v);
  const __nv_bfloat162* b = reinterpret_cast<const __nv_bfloat162*>(&s);
  __nv_bfloat162* c = reinterpret_cast<__nv_bfloat162*>(&out);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 p = __bfloat1622float2(a[i]), q = __bfloat1622float2(b[i]);
    squares += p.x * p.x + p.y * p.y;
    c[i] = __floats2bfloat162_rn(p.x * q.x, p.y * q.y);
  }
  return out;
}

// TILES: groups of 8 tokens. GROUPS: of 32 columns, a warp.
template <int TILES, int GROUPS>
__global__ void __launch_bounds__(kMaxThreads) skinny(const Arguments a) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warps = a.row_warps * a.column_warps, threads = warps * 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int row_warp = warp % a.row_warps, column_warp = warp / a.row_warps;
  const int split = blockIdx.y, splits = gridDim.y;
  const int block_columns = a.column_warps * GROUPS * 32, first_column = split * block_columns;
  const int part_pitch = a.row_warps * 16 + 4;
  constexpr int kTokens = TILES * 8;

  __nv_bfloat16* x_tile = reinterpret_cast<__nv_bfloat16*>(shared);                        // [kTokens][x_pitch]
  float* parts = reinterpret_cast<float*>(shared + sizeof(__nv_bfloat16) * kTokens * a.x_pitch);  // [column_warps][kTokens][part_pitch]
  float* squares = parts + a.column_warps * kTokens * part_pitch;                          // [kTokens]

  // The weights. Rows and columns beyond the edge read something valid that is not used.
  const bool gated = a.activation != 0;
  const int half_warps = gated ? a.row_warps / 2 : a.row_warps, block_features = half_warps * 16;
  const int first_feature = blockIdx.x * block_features;
  const bool is_up = row_warp >= half_warps;
  const int feature = first_feature + (row_warp - (is_up ? half_warps : 0)) * 16 + g;
  const long long base = is_up ? a.features : 0;
  const __nv_bfloat16* row0 = a.w + (base + min(feature, a.features - 1)) * a.columns;
  const __nv_bfloat16* row1 = a.w + (base + min(feature + 8, a.features - 1)) * a.columns;
  const int warp_column = first_column + column_warp * GROUPS * 32;
  uint4 w0[GROUPS], w1[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const int column = min(warp_column + i * 32, a.columns - 32) + t * 8;
    w0[i] = load_weights(row0 + column);
    w1[i] = load_weights(row1 + column);
  }

  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (a.early) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  // This thread's outputs: pairs of features of one token. The cluster's blocks share the tokens out.
  const int tokens_each = (kTokens + splits - 1) / splits, pairs = block_features / 2;
  __nv_bfloat162 residual[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    residual[i] = __floats2bfloat162_rn(0.0f, 0.0f);
    const int index = threadIdx.x + i * threads;
    const int token = split * tokens_each + index / pairs, column = first_feature + index % pairs * 2;
    if (a.add && index < tokens_each * pairs && token < a.tokens && column < a.features)
      residual[i] = *reinterpret_cast<const __nv_bfloat162*>(a.out + (size_t)token * a.features + column);
  }

  // The tokens: a warp takes every warps-th, its lanes 8 columns at a time, so 256 columns a turn. A few turns' loads are
  // on their way before the first is used.
  const int turns_each = (block_columns + 255) / 256;  // of a token
  const int turns = (kTokens - warp + warps - 1) / warps * turns_each;
  int token = warp, turn = 0;
  float sum = 0.0f;
  for (int done = 0; done < turns; done += kAhead) {
    uint4 values[kAhead], scales[kAhead];
    int next_token = token, next_turn = turn;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int c = next_turn * 256 + lane * 8, column = first_column + c;
      values[i] = scales[i] = make_uint4(0, 0, 0, 0);
      if (c < block_columns && next_token < a.tokens && column < a.columns) {
        values[i] = *reinterpret_cast<const uint4*>(a.x + (size_t)next_token * a.x_stride + column);
        if (a.scale != nullptr) scales[i] = *reinterpret_cast<const uint4*>(a.scale + column);
      }
      if (++next_turn == turns_each) next_turn = 0, next_token += warps;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (done + i >= turns) break;
      const int c = turn * 256 + lane * 8;
      const uint4 v = a.scale == nullptr ? values[i] : scaled(values[i], scales[i], sum);
      if (c < block_columns) *reinterpret_cast<uint4*>(x_tile + token * a.x_pitch + c) = v;
      if (++turn == turns_each) {
        if (a.scale != nullptr) {
#pragma unroll
          for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
          if (lane == 0) squares[token] = sum;
        }
        turn = 0, token += warps, sum = 0.0f;
      }
    }
  }
  __syncthreads();

  float acc[TILES][4] = {};
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    if (warp_column + i * 32 < a.columns) {  // the same for all lanes
      const __nv_bfloat16* at = x_tile + g * a.x_pitch + (column_warp * GROUPS + i) * 32 + t * 8;
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        const uint4 b = *reinterpret_cast<const uint4*>(at + j * 8 * a.x_pitch);
        mma(acc[j], w0[i].x, w1[i].x, w0[i].y, w1[i].y, b.x, b.y);
        mma(acc[j], w0[i].z, w1[i].z, w0[i].w, w1[i].w, b.z, b.w);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    float* at = parts + (column_warp * kTokens + j * 8 + 2 * t) * part_pitch + row_warp * 16 + g;
    at[0] = acc[j][0];
    at[part_pitch] = acc[j][1];
    at[8] = acc[j][2];
    at[part_pitch + 8] = acc[j][3];
  }
  if (splits > 1) cluster_sync(); else __syncthreads();

#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int index = threadIdx.x + i * threads;
    const int local = index % pairs * 2, token = split * tokens_each + index / pairs, column = first_feature + local;
    if (index >= tokens_each * pairs || token >= a.tokens || column >= a.features) continue;
    float2 value = {0.0f, 0.0f}, up = {0.0f, 0.0f};
    float square = 0.0f;
    for (int s = 0; s < splits; ++s) {
      const uint32_t from = cluster_address(parts, s);
      for (int p = 0; p < a.column_warps; ++p) {
        const uint32_t at = from + sizeof(float) * ((p * kTokens + token) * part_pitch + local);
        const float2 v = load_cluster2(at);
        value.x += v.x, value.y += v.y;
        if (gated) {
          const float2 u = load_cluster2(at + sizeof(float) * block_features);
          up.x += u.x, up.y += u.y;
        }
      }
      if (a.scale != nullptr) square += load_cluster(cluster_address(squares + token, s));
    }
    if (a.scale != nullptr) {
      const float inverse = rsqrtf(square / a.columns + a.eps);
      value.x *= inverse, value.y *= inverse, up.x *= inverse, up.y *= inverse;
    }
    if (a.bias != nullptr) {
      value.x += __bfloat162float(a.bias[column]), value.y += __bfloat162float(a.bias[column + 1]);
      if (gated) up.x += __bfloat162float(a.bias[a.features + column]), up.y += __bfloat162float(a.bias[a.features + column + 1]);
    }
    if (gated) {
      value.x = activate(value.x, a.activation) * up.x;
      value.y = activate(value.y, a.activation) * up.y;
    }
    value.x += __bfloat162float(residual[i].x), value.y += __bfloat162float(residual[i].y);
    *reinterpret_cast<__nv_bfloat162*>(a.out + (size_t)token * a.features + column) = __floats2bfloat162_rn(value.x, value.y);
  }
  if (splits > 1) cluster_sync();  // nobody leaves while others read its sums
}

template <int TILES>
const void* pick(int groups) {
  if (groups <= 2) return reinterpret_cast<const void*>(skinny<TILES, 2>);
  if (groups <= 4) return reinterpret_cast<const void*>(skinny<TILES, 4>);
  if (groups <= 6) return reinterpret_cast<const void*>(skinny<TILES, 6>);
  if (groups <= 8) return reinterpret_cast<const void*>(skinny<TILES, 8>);
  return nullptr;
}

}  // namespace

// Launches on `stream`; dependent: 0 no programmatic dependent launch, 1 yes, 2 early. features must be even, columns a multiple of 32, x_stride of 8, all pointers 16-byte aligned.
// Returns a CUDA error code; -1: the shape does not fit this configuration.
extern "C" int skinny_linear(const void* x, const void* w, const void* bias, const void* scale, void* out, int tokens,
                             int features, int columns, int x_stride, float eps, int activation, int add, int row_warps,
                             int column_warps, int splits, int dependent, int device, cudaStream_t stream) {
  int current = -1;  // this library's runtime is its own: it may not know what torch's has set
  if (cudaGetDevice(&current) != cudaSuccess || current != device) cudaSetDevice(device);
  const int tiles = tokens <= 8 ? 1 : 2;
  int groups = (columns / 32 + splits * column_warps - 1) / (splits * column_warps);
  groups += groups & 1;
  const void* kernel = tiles == 1 ? pick<1>(groups) : pick<2>(groups);
  const int threads = row_warps * column_warps * 32, kept = groups <= 2 ? 2 : groups;
  if (kernel == nullptr || tokens > 16 || threads > kMaxThreads || columns % 32 != 0 || features % 2 != 0 || splits > 8) return -1;
  // A thread keeps one pair of outputs for each tile of tokens.
  const int block_features = (activation != 0 ? row_warps / 2 : row_warps) * 16, padded = tiles * 8;
  if ((padded + splits - 1) / splits * (block_features / 2) > threads * tiles) return -1;
  const int block_columns = column_warps * kept * 32;
  Arguments a;
  a.x = static_cast<const __nv_bfloat16*>(x), a.w = static_cast<const __nv_bfloat16*>(w);
  a.bias = static_cast<const __nv_bfloat16*>(bias), a.scale = static_cast<const __nv_bfloat16*>(scale);
  a.out = static_cast<__nv_bfloat16*>(out);
  a.tokens = tokens, a.features = features, a.columns = columns, a.x_stride = x_stride, a.eps = eps;
  a.early = dependent > 1, a.activation = activation, a.add = add, a.row_warps = row_warps, a.column_warps = column_warps;
  a.x_pitch = block_columns + 32;  // block_columns is a multiple of 64
  const size_t bytes = 2 * padded * a.x_pitch + 4 * padded * (column_warps * (row_warps * 16 + 4) + 1);
  if (bytes > 227 * 1024) return -1;
  if (bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((features + block_features - 1) / block_features, splits, 1);
  config.blockDim = dim3(threads, 1, 1);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 1, attributes[0].val.clusterDim.y = splits, attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.numAttrs = dependent > 0 ? 2 : 1;
  void* arguments[] = {&a};
  return static_cast<int>(cudaLaunchKernelExC(&config, kernel, arguments));
}
