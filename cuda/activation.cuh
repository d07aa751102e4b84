/* activation.cuh: the activation functions on the device. */
#ifndef MT_CUDA_ACTIVATION_CUH
#define MT_CUDA_ACTIVATION_CUH

#include "vector.cuh"

__device__ static inline float sigmoid(float x) {
    return __fdividef(1, 1 + mt_exp(-x));
}

/* log(1 + exp(x)). */
__device__ static inline float softplus(float x) {
    return x > 20 ? x : log1pf(expf(x));
}

/* The standard normal CDF, erfc(-x / sqrt(2)) / 2, by the Chebyshev fit erfcc of Press et al., "Numerical Recipes", as
 * on the CPU. */
__device__ static inline float normal_cdf(float x) {
    float z = fabsf(x) * 0.70710678f, t = __fdividef(1, 1 + 0.5f * z);
    float p = 0.17087277f;
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    float tail = 0.5f * t * mt_exp(-z * z - 1.26551223f + t * p);
    return x < 0 ? tail : 1 - tail;
}

/* Each activation f: f(x) and f'(x), named as in the rows of MT_ACTIVATIONS. */
struct gelu {
    __device__ static float value(float x) {
        return x * normal_cdf(x);
    }
    __device__ static float slope(float x) {
        return normal_cdf(x) + x * (0.39894228f * mt_exp(-0.5f * x * x));
    }
};

/* The approximation (1 + tanh(u)) / 2 = sigmoid(2 u) of the CDF. */
struct gelu_tanh {
    __device__ static float cdf(float x) {
        return sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    }
    __device__ static float value(float x) {
        return x * cdf(x);
    }
    __device__ static float slope(float x) {
        float s = cdf(x);
        return s + x * (s * (1 - s) * 1.59576912f * (1 + 3 * 0.044715f * x * x));
    }
};

struct relu {
    __device__ static float value(float x) {
        return x < 0 ? 0 : x; // NaN stays
    }
    __device__ static float slope(float x) {
        return x < 0 ? 0 : 1;
    }
};

struct squared_relu {
    __device__ static float relu(float x) {
        return x < 0 ? 0 : x; // NaN stays
    }
    __device__ static float value(float x) {
        return relu(x) * relu(x);
    }
    __device__ static float slope(float x) {
        return 2 * relu(x);
    }
};

struct silu {
    __device__ static float value(float x) {
        return x * sigmoid(x);
    }
    __device__ static float slope(float x) {
        float s = sigmoid(x);
        return s * (1 + x * (1 - s));
    }
};

struct quick_gelu {
    __device__ static float value(float x) {
        return x * sigmoid(1.702f * x);
    }
    __device__ static float slope(float x) {
        float s = sigmoid(1.702f * x);
        return s * (1 + 1.702f * x * (1 - s));
    }
};

/* The operands of a gated activation as they are, or by an mt_glu: f(gate(x)) up(x), and the slopes of both. */
struct plain_glu {
    __device__ static float gate(float x) {
        return x;
    }
    __device__ static float up(float x) {
        return x;
    }
    __device__ static float gate_slope(float) {
        return 1;
    }
    __device__ static float up_slope(float) {
        return 1;
    }
};

struct bounded_glu { // comparisons are false for NaN, which stays
    float high, offset;
    __device__ float gate(float x) const {
        return x > high ? high : x;
    }
    __device__ float up(float x) const {
        return (x > high ? high : x < -high ? -high : x) + offset;
    }
    __device__ float gate_slope(float x) const {
        return x > high ? 0 : 1;
    }
    __device__ float up_slope(float x) const {
        return x > high || x < -high ? 0 : 1;
    }
};

/* For kernels that read the row at run time: f(x), and whether the layer computes f(gate) up. */
__device__ static inline float mt_activate(mt_activation activation, float x) {
    switch (activation) {
#define MT_ACTIVATION_VALUE(name, f, ...)                                                                              \
    case MT_ACTIVATION_##name:                                                                                         \
        return f::value(x);
        MT_ACTIVATIONS(MT_ACTIVATION_VALUE)
#undef MT_ACTIVATION_VALUE
    default:
        return __int_as_float(0x7fc00000); // NaN
    }
}

__host__ __device__ static inline bool mt_is_gated(mt_activation activation) {
    bool is_gated = false;
#define MT_ACTIVATION_GATED(name, f, gated, ...) is_gated = activation == MT_ACTIVATION_##name ? gated : is_gated;
    MT_ACTIVATIONS(MT_ACTIVATION_GATED)
#undef MT_ACTIVATION_GATED
    return is_gated;
}

#endif
