// Linear layers for up to 16 tokens, bound by the weights' bytes: out = residual + act(norm(x) @ w.T + bias).
//
// A warp owns 16 rows of the weight (in a gated layer 8 of the gate and the same 8 of up) and a range of its columns. It
// loads all of that straight into registers, in the layout of the tensor cores' A operand and before it waits for the
// kernel before this one (programmatic dependent launch): the weights' bytes are on their way while nothing else can be
// done. The tokens' columns follow, in the layout of the B operand, and are scaled by the norm's weight in registers. The
// column ranges of a block's warps and of a cluster's blocks (distributed shared memory) are summed in a fixed order.
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
  int row_warps;
  int column_warps;
  int early;       // let the next kernel start: 1 after the wait, 2 after the products
};

constexpr int kMaxThreads = 256;

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

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

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

__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;"); }

// TILES: groups of 8 tokens. GROUPS: of 32 columns a warp.
template <int TILES, int GROUPS>
__global__ void __launch_bounds__(kMaxThreads) skinny(const Arguments a) {
  extern __shared__ __align__(16) float parts[];  // [column_warps][kTokens][part_pitch]
  constexpr int kTokens = TILES * 8, kMaxParts = 8;
  const int warps = a.row_warps * a.column_warps, threads = warps * 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int row_warp = warp % a.row_warps, column_warp = warp / a.row_warps;
  const int split = blockIdx.y, splits = gridDim.y;
  const int part_pitch = a.row_warps * 16 + 4, part_size = kTokens * part_pitch;
  float* squares = parts + a.column_warps * part_size;     // [column_warps][kTokens]
  float* inverses = squares + a.column_warps * kTokens;    // [kTokens]

  // The weights and the norm's scale. Rows and columns beyond the edge read something valid that is not used.
  const bool gated = a.activation != 0;
  const int block_features = a.row_warps * (gated ? 8 : 16);
  const int first_feature = blockIdx.x * block_features;
  const int feature = first_feature + row_warp * (gated ? 8 : 16) + g;
  const long long second = gated ? (long long)a.features + min(feature, a.features - 1) : min(feature + 8, a.features - 1);
  const __nv_bfloat16* row0 = a.w + (long long)min(feature, a.features - 1) * a.columns;
  const __nv_bfloat16* row1 = a.w + second * a.columns;
  const int first_column = (split * a.column_warps + column_warp) * GROUPS * 32;
  uint4 w0[GROUPS], w1[GROUPS], scales[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const int column = min(first_column + i * 32, a.columns - 32) + t * 8;
    w0[i] = load_weights(row0 + column);
    w1[i] = load_weights(row1 + column);
  }
  if (a.scale != nullptr) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
      scales[i] = *reinterpret_cast<const uint4*>(a.scale + min(first_column + i * 32, a.columns - 32) + t * 8);
  }

  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (a.early == 1) start_next();

  // The tokens, as the B operand wants them: token g of a tile, the same columns as the weights. All loads go out at once.
  uint4 x[TILES][GROUPS];
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    const int token = j * 8 + g;
    const __nv_bfloat16* from = a.x + (size_t)token * a.x_stride + t * 8;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const int column = first_column + i * 32;
      x[j][i] = make_uint4(0, 0, 0, 0);
      if (token < a.tokens && column < a.columns) x[j][i] = *reinterpret_cast<const uint4*>(from + column);
    }
  }
  float acc[TILES][4] = {}, sums[TILES] = {};
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const uint4 b = a.scale == nullptr ? x[j][i] : scaled(x[j][i], scales[i], sums[j]);
      mma(acc[j], w0[i].x, w1[i].x, w0[i].y, w1[i].y, b.x, b.y);
      mma(acc[j], w0[i].z, w1[i].z, w0[i].w, w1[i].w, b.z, b.w);
    }
  }
  if (a.early == 2) start_next();
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    float* at = parts + column_warp * part_size + (j * 8 + 2 * t) * part_pitch + row_warp * 16 + g;
    at[0] = acc[j][0];
    at[part_pitch] = acc[j][1];
    at[8] = acc[j][2];
    at[part_pitch + 8] = acc[j][3];
    if (a.scale != nullptr && row_warp == 0) {
      float sum = sums[j];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (t == 0) squares[column_warp * kTokens + j * 8 + g] = sum;
    }
  }
  __syncthreads();
  if (splits > 1) {  // the block's own sum first: less to read from the others
    for (int i = threadIdx.x; i < part_size; i += threads) {
      float total = parts[i];
      for (int p = 1; p < a.column_warps; ++p) total += parts[p * part_size + i];
      parts[i] = total;
    }
    if (threadIdx.x < kTokens) {
      float total = squares[threadIdx.x];
      for (int p = 1; p < a.column_warps; ++p) total += squares[p * kTokens + threadIdx.x];
      squares[threadIdx.x] = total;
    }
  }

  // This thread's output: two features of one token. The cluster's blocks share the tokens out.
  const int tokens_each = (kTokens + splits - 1) / splits, pairs = block_features / 2;
  const int local = threadIdx.x % pairs * 2, token_in = threadIdx.x / pairs, token = split * tokens_each + token_in;
  const int column = first_feature + local;
  const bool mine = token_in < tokens_each && token < a.tokens && column < a.features;
  __nv_bfloat162* target = reinterpret_cast<__nv_bfloat162*>(a.out + (size_t)token * a.features + column);
  __nv_bfloat162 residual = __floats2bfloat162_rn(0.0f, 0.0f);
  if (a.add && mine) residual = *target;
  if (splits > 1) cluster_arrive(), cluster_wait();

  // A row warp's 16 rows are 16 features, or 8 of the gate and the same 8 of up.
  const int row = gated ? local / 8 * 16 + local % 8 : local, up_row = row + 8;
  const int count = splits > 1 ? splits : a.column_warps;
  float2 v[kMaxParts], u[kMaxParts];
  float q[kMaxParts];
#pragma unroll
  for (int p = 0; p < kMaxParts; ++p) {  // all of them are on their way before the first is used
    v[p] = u[p] = make_float2(0.0f, 0.0f), q[p] = 0.0f;
    if (p >= count || !mine) continue;
    const int at = token * part_pitch + row, up_at = token * part_pitch + up_row;
    if (splits > 1) {
      v[p] = load_cluster2(cluster_address(parts + at, p));
      if (gated) u[p] = load_cluster2(cluster_address(parts + up_at, p));
      if (a.scale != nullptr) q[p] = load_cluster(cluster_address(squares + token, p));
    } else {
      v[p] = *reinterpret_cast<const float2*>(parts + p * part_size + at);
      if (gated) u[p] = *reinterpret_cast<const float2*>(parts + p * part_size + up_at);
      if (a.scale != nullptr) q[p] = squares[p * kTokens + token];
    }
  }
  float2 value = {0.0f, 0.0f}, up = {0.0f, 0.0f};
  float square = 0.0f;
#pragma unroll
  for (int p = 0; p < kMaxParts; ++p) {
    value.x += v[p].x, value.y += v[p].y, up.x += u[p].x, up.y += u[p].y, square += q[p];
  }
  if (splits > 1) cluster_arrive();
  if (mine) {
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
    value.x += __bfloat162float(residual.x), value.y += __bfloat162float(residual.y);
    *target = __floats2bfloat162_rn(value.x, value.y);
  }
  if (splits > 1) cluster_wait();  // nobody leaves while others read its sums
}

template <int TILES>
const void* pick(int groups) {
  if (groups <= 1) return reinterpret_cast<const void*>(skinny<TILES, 1>);
  if (groups <= 2) return reinterpret_cast<const void*>(skinny<TILES, 2>);
  if (groups <= 3) return reinterpret_cast<const void*>(skinny<TILES, 3>);
  if (groups <= 4) return reinterpret_cast<const void*>(skinny<TILES, 4>);
  if (groups <= 6) return reinterpret_cast<const void*>(skinny<TILES, 6>);
  if (groups <= 8) return reinterpret_cast<const void*>(skinny<TILES, 8>);
  return nullptr;
}

}  // namespace

// Launches on `stream`; dependent: 0 no programmatic dependent launch, 1 yes, 2 and 3 with `early` 1 and 2. features must be even (a multiple
// of 8 with an activation), columns a multiple of 32, x_stride of 8, all pointers 16-byte aligned.
// Returns a CUDA error code; -1: the shape does not fit this configuration.
extern "C" int skinny_linear(const void* x, const void* w, const void* bias, const void* scale, void* out, int tokens,
                             int features, int columns, int x_stride, float eps, int activation, int add, int row_warps,
                             int column_warps, int splits, int dependent, int device, cudaStream_t stream) {
  int current = -1;  // this library's runtime is its own: it may not know what torch's has set
  if (cudaGetDevice(&current) != cudaSuccess || current != device) cudaSetDevice(device);
  const int threads = row_warps * column_warps * 32, block_features = row_warps * (activation != 0 ? 8 : 16);
  if (tokens > 16 || threads > kMaxThreads || column_warps > 8 || splits > 8 || columns % 32 != 0) return -1;
  if (features % (activation != 0 ? 8 : 2) != 0) return -1;
  const int groups = (columns / 32 + splits * column_warps - 1) / (splits * column_warps);
  const void* kernel = tokens <= 8 ? pick<1>(groups) : pick<2>(groups);
  const int padded = tokens <= 8 ? 8 : 16;
  // A thread has one pair of outputs.
  if (kernel == nullptr || (padded + splits - 1) / splits * (block_features / 2) > threads) return -1;
  Arguments a;
  a.x = static_cast<const __nv_bfloat16*>(x), a.w = static_cast<const __nv_bfloat16*>(w);
  a.bias = static_cast<const __nv_bfloat16*>(bias), a.scale = static_cast<const __nv_bfloat16*>(scale);
  a.out = static_cast<__nv_bfloat16*>(out);
  a.tokens = tokens, a.features = features, a.columns = columns, a.x_stride = x_stride, a.eps = eps;
  a.early = dependent > 1 ? dependent - 1 : 0, a.activation = activation, a.add = add;
  a.row_warps = row_warps, a.column_warps = column_warps;
  const size_t bytes = 4 * padded * (column_warps * (row_warps * 16 + 4 + 1) + 1);
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
