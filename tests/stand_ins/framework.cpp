// What a framework defines beside the NCCL that is linked into it.
#define OPERATOR(n) \
  extern "C" __attribute__((visibility("default"))) int framework_operator_##n() { return n; }
#define OPERATORS(n) \
  OPERATOR(n##0)     \
  OPERATOR(n##1)     \
  OPERATOR(n##2) OPERATOR(n##3) OPERATOR(n##4) OPERATOR(n##5) OPERATOR(n##6) OPERATOR(n##7) OPERATOR(n##8) OPERATOR(n##9)
OPERATORS(1)
OPERATORS(2)
OPERATORS(3)
OPERATORS(4)
OPERATORS(5)
