// What Python sees of the device beside PyTorch's own functions, and its autocast.
#include "late.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HIGHER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(HIGHER)
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("show_copies_first", [](bool first) {
    late::set_order(first ? late::Order::kStreamsFirst : late::Order::kStreamsLast);
  });
  m.def("set_limit", &late::set_limit);
  m.def("count_pending", &late::pending_tasks);
  m.def("current_device", [] { return int(late::current_device()); });
  m.def("set_device", [](int device) { late::exchange_device(c10::DeviceIndex(device)); });
  m.def("default_generator", [](int device) {
    return at::globalContext().defaultGenerator(c10::Device(late::kLate, c10::DeviceIndex(device)));
  });
  m.attr("device_count") = int(late::kDevices);
}
