// Matrix products of a few rows with a large weight, as a function of the programs that AOTInductor writes (product.py).
//
// A weight is packed in blocks of 16 outputs, (blocks, inputs, 16), so that it is read once, from its beginning to its
// end, while the sums of up to 6 rows stay in registers. Weights are float or bfloat16, and so are rows; sums are float.

#ifdef __clang__
#define DRAFTSMITH_FAST
#pragma clang fp contract(fast)
#else
#define DRAFTSMITH_FAST __attribute__((optimize("O3", "fp-contract=fast")))
#endif

namespace draftsmith {

constexpr int64_t BLOCK = 16;
constexpr int64_t ROWS = 6;  // with two vectors a row, AVX2 has registers for the sums of six
#ifdef __AVX512F__
constexpr int64_t WIDTH = 16;
#else
constexpr int64_t WIDTH = 8;
#endif
constexpr int64_t VECTORS = BLOCK / WIDTH;
constexpr int64_t ALONE = 1 << 16;  // weights of so few numbers are one thread's work

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef Floats LooseFloats __attribute__((aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2)));

static inline __attribute__((always_inline)) void load(const float* from, Floats& to) {
    to = *reinterpret_cast<const LooseFloats*>(from);
}

// bfloat16 is the upper half of float.
static inline __attribute__((always_inline)) void load(const uint16_t* from, Floats& to) {
    to = reinterpret_cast<Floats>(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16);
}

static inline void store(float value, float* to) { *to = value; }

// To the nearest, ties to even, as torch rounds.
static inline void store(float value, uint16_t* to) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    *to = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// One block of outputs of M rows.
template <int M, class Weight, class Output>
DRAFTSMITH_FAST static void tile(
    const float* rows, int64_t inputs, const Weight* weight, Output* outputs, int64_t stride, int64_t count) {
    Floats sums[M][VECTORS] = {};
    for (int64_t k = 0; k < inputs; k++) {
        Floats w[VECTORS];
        for (int v = 0; v < VECTORS; v++) load(weight + k * BLOCK + v * WIDTH, w[v]);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++)
            for (int v = 0; v < VECTORS; v++) sums[m][v] += w[v] * rows[m * inputs + k];
    }
    for (int m = 0; m < M; m++)
        for (int64_t i = 0; i < count; i++)
            store(sums[m][i / WIDTH][i % WIDTH], outputs + m * stride + i);
}

template <class Weight, class Output>
static void tiles(
    const float* rows, int64_t count, int64_t inputs, const Weight* weight, Output* outputs, int64_t stride, int64_t width) {
    while (count > 0) {
        // Seven rows and eight are four and the rest: no tile of one or two.
        const int64_t size = count <= ROWS ? count : count <= 8 ? 4 : ROWS;
        switch (size) {
            case 1: tile<1>(rows, inputs, weight, outputs, stride, width); break;
            case 2: tile<2>(rows, inputs, weight, outputs, stride, width); break;
            case 3: tile<3>(rows, inputs, weight, outputs, stride, width); break;
            case 4: tile<4>(rows, inputs, weight, outputs, stride, width); break;
            case 5: tile<5>(rows, inputs, weight, outputs, stride, width); break;
            default: tile<6>(rows, inputs, weight, outputs, stride, width);
        }
        rows += size * inputs;
        outputs += size * stride;
        count -= size;
    }
}

template <class Weight, class Output>
DRAFTSMITH_FAST static void product(
    const float* rows, int64_t count, int64_t inputs, const Weight* weight, Output* outputs, int64_t stride) {
    const int64_t blocks = (stride + BLOCK - 1) / BLOCK;
    const bool widens = sizeof(Weight) == 2 && count > 2 * ROWS;  // what many tiles read becomes float once
#pragma omp parallel if (inputs * stride > ALONE)
    {
        std::vector<float> widened(widens ? inputs * BLOCK : 0);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            const Weight* of_block = weight + block * inputs * BLOCK;
            const int64_t width = stride - block * BLOCK < BLOCK ? stride - block * BLOCK : BLOCK;
            Output* to = outputs + block * BLOCK;
            if (!widens) {
                tiles(rows, count, inputs, of_block, to, stride, width);
                continue;
            }
            for (int64_t at = 0; at < inputs * BLOCK; at += WIDTH) {
                Floats w;
                load(of_block + at, w);
                *reinterpret_cast<LooseFloats*>(&widened[at]) = w;
            }
            tiles(rows, count, inputs, widened.data(), to, stride, width);
        }
    }
}

template <class Output>
static void product_of(
    const float* rows, int64_t count, int64_t inputs, const void* weight, bool halved, Output* outputs, int64_t stride) {
    if (halved)
        product(rows, count, inputs, static_cast<const uint16_t*>(weight), outputs, stride);
    else
        product(rows, count, inputs, static_cast<const float*>(weight), outputs, stride);
}

static AOTITorchError product_into(
    AtenTensorHandle rows, AtenTensorHandle weight, int64_t stride, AtenTensorHandle* outputs) {
    int64_t dim, inputs = 0, count = 1, *sizes, *strides;
    int32_t type, stored, device_index;
    void *from, *weights, *to;
    bool contiguous;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(rows, &dim));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(rows, &sizes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(rows, &type));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(weight, &stored));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(rows, &device_index));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(rows, &contiguous));
    const int32_t half = aoti_torch_dtype_bfloat16(), whole = aoti_torch_dtype_float32();
    if (!contiguous || (type != half && type != whole) || (stored != half && stored != whole)) return AOTI_TORCH_FAILURE;
    std::vector<int64_t> shape(sizes, sizes + dim), steps(dim, 1);
    inputs = shape[dim - 1];
    for (int64_t i = 0; i + 1 < dim; i++) count *= shape[i];
    shape[dim - 1] = stride;
    for (int64_t i = dim - 1; i > 0; i--) steps[i - 1] = steps[i] * shape[i];
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        dim, shape.data(), steps.data(), type, aoti_torch_device_type_cpu(), device_index, outputs));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(rows, &from));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(weight, &weights));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(*outputs, &to));
    if (type == whole) {
        product_of(static_cast<float*>(from), count, inputs, weights, stored == half, static_cast<float*>(to), stride);
        return AOTI_TORCH_SUCCESS;
    }
    std::vector<float> widened(count * inputs);
    const uint16_t* halves = static_cast<uint16_t*>(from);
    for (int64_t i = 0; i < count * inputs; i++) {
        const uint32_t bits = uint32_t(halves[i]) << 16;
        __builtin_memcpy(&widened[i], &bits, 4);
    }
    product_of(widened.data(), count, inputs, weights, stored == half, static_cast<uint16_t*>(to), stride);
    return AOTI_TORCH_SUCCESS;
}

}  // namespace draftsmith
