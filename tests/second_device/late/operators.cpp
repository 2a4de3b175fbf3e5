// Operators of the device: each is the CPU's, run by a task on the device's memory.
//
// Shapes come from the meta device, so that nothing has to run for them. Where they depend on
// values the host waits, as for `nonzero` on a GPU.
#include "late.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <optional>
#include <vector>

namespace late {
namespace {

using at::Tensor;
using c10::IValue;
using c10::IntArrayRef;
using torch::jit::Stack;

bool is_late(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kLate;
}

// A tensor on the CPU over the same memory. It does not hold that.
Tensor as_cpu(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  auto blob = at::from_blob(
      tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj())
    blob = blob.conj();
  if (tensor.is_neg())
    blob._set_neg(true);
  return blob;
}

Tensor as_meta(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// ---- memory and views

Tensor empty(
    IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(at::Device(kLate, current_device())));
  return at::detail::empty_generic(
      size,
      c10::GetAllocator(kLate),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(at::Device(kLate, current_device())));
  return at::detail::empty_strided_generic(
      size,
      stride,
      c10::GetAllocator(kLate),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

void grow(const c10::Storage& storage, size_t nbytes) {
  if (nbytes > storage.nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, nbytes);
}

const Tensor& resize_(
    const Tensor& self,
    IntArrayRef size,
    std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  auto count = size_t(self.numel() + self.storage_offset());
  grow(self.storage(), count * self.itemsize());
  return self;
}

Tensor& set_storage(
    Tensor& self,
    c10::Storage storage,
    int64_t offset,
    IntArrayRef size,
    IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  auto nbytes = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), size_t(offset));
  grow(self.storage(), self.numel() == 0 ? 0 : nbytes);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t count = int64_t(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr().get_context(), stream);
}

// ---- copies

void wait_on_host(c10::Stream stream) {
  c10::impl::VirtualGuardImpl(kLate).synchronizeStream(stream);
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0)
    return target;
  auto source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  if (is_late(source) && is_late(target)) {
    auto here = current_stream(source.device().index());
    auto there = current_stream(target.device().index());
    auto from = as_cpu(source), to = as_cpu(target);
    if (here.device() != there.device()) { // as on CUDA, both wait for each other
      auto before = last_task(there);
      enqueue(here, [there, before] { run_until(there, before); });
    }
    auto task = enqueue(here, [from, to] { to.copy_(from); });
    if (here.device() != there.device())
      enqueue(there, [here, task] { run_until(here, task); });
  } else if (is_late(target)) {
    auto stream = current_stream(target.device().index());
    bool is_async = non_blocking && is_pinned(source.const_data_ptr());
    auto from = is_async
        ? at::from_blob(
              source.mutable_data_ptr(), source.sizes(), source.strides(), source.options())
        : source.clone();
    auto to = as_cpu(target);
    auto task = enqueue(stream, [from, to] { to.copy_(from); });
    if (is_async)
      note_pinned_use(source.const_data_ptr(), stream, task);
  } else {
    auto stream = current_stream(source.device().index());
    auto from = as_cpu(source);
    if (non_blocking && is_pinned(target.const_data_ptr())) {
      auto to = at::from_blob(
          target.mutable_data_ptr(), target.sizes(), target.strides(), target.options());
      auto task = enqueue(stream, [from, to] { to.copy_(from); });
      note_pinned_use(target.const_data_ptr(), stream, task);
    } else {
      wait_on_host(stream);
      target.copy_(from);
    }
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  wait_on_host(current_stream(self.device().index()));
  return as_cpu(self).item();
}

// ---- all other operators

template <typename Convert>
IValue convert_tensors(const IValue& value, const Convert& convert, c10::DeviceType instead) {
  if (value.isTensor())
    return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector())
      made.push_back(convert(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      made.push_back(tensor.has_value() ? std::optional<Tensor>(convert(*tensor)) : std::nullopt);
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kLate)
    return c10::Device(instead);
  return value;
}

struct Call {
  c10::OperatorHandle op;
  Stack args;
  c10::Device device;
  std::optional<uint64_t> seed = std::nullopt;
  int generator_at = -1;

  Stack to_cpu() const {
    Stack made;
    auto convert = [this](const Tensor& tensor) {
      if (is_late(tensor) && tensor.numel() == 0)
        return at::empty_strided(
            tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
      if (is_late(tensor)) {
        TORCH_CHECK(
            tensor.device() == device,
            "expected all tensors on ", device, ", but one is on ", tensor.device());
        return as_cpu(tensor);
      }
      TORCH_CHECK(
          !tensor.defined() || tensor.dim() == 0 || op.schema().name().find("index") < 16,
          "expected all tensors on ", device, ", but one is on ", tensor.device(), ": ",
          op.schema().name());
      // the host may change it before the task runs
      bool is_number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return is_number || !tensor.defined() ? tensor : tensor.clone();
    };
    for (const IValue& arg : args)
      made.push_back(convert_tensors(arg, convert, c10::DeviceType::CPU));
    return made;
  }

  Stack to_meta() const {
    Stack made;
    auto convert = [](const Tensor& tensor) {
      return !tensor.defined() || (!is_late(tensor) && tensor.dim() == 0) ? tensor
                                                                          : as_meta(tensor);
    };
    for (const IValue& arg : args)
      made.push_back(convert_tensors(arg, convert, c10::DeviceType::Meta));
    if (generator_at >= 0)
      made[size_t(generator_at)] = IValue();
    return made;
  }
};

// The CPU's operator, with the random numbers that belong to the call.
Stack run_on_cpu(const Call& call, Stack stack) {
  if (!call.seed.has_value()) {
    call.op.callBoxed(stack);
    return stack;
  }
  if (call.generator_at >= 0) {
    stack[size_t(call.generator_at)] = at::make_generator<at::CPUGeneratorImpl>(*call.seed);
    call.op.callBoxed(stack);
    return stack;
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  auto before = generator.get_state();
  generator.set_current_seed(*call.seed);
  call.op.callBoxed(stack);
  generator.set_state(before);
  return stack;
}

std::vector<IValue> results_of(const Call& call, const Stack& stack) {
  auto count = call.op.schema().returns().size();
  return {stack.end() - int64_t(count), stack.end()};
}

// The argument that a result is, if the operator writes to it.
std::optional<IValue> find_written(const Call& call, size_t result) {
  auto* info = call.op.schema().returns()[result].alias_info();
  if (info == nullptr || !info->isWrite())
    return std::nullopt;
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto* theirs = arguments[i].alias_info();
    if (theirs != nullptr && theirs->beforeSets() == info->beforeSets())
      return call.args[i];
  }
  return std::nullopt;
}

const Tensor* find_viewed(const Call& call, size_t result) {
  auto* info = call.op.schema().returns()[result].alias_info();
  if (info == nullptr || info->isWrite())
    return nullptr;
  for (const IValue& arg : call.args)
    if (arg.isTensor())
      return &arg.toTensor();
  return nullptr;
}

// Copy what the CPU made to tensors on the device that look like `like`.
IValue make_results(const Call& call, const IValue& like, std::vector<Tensor>& made) {
  auto make = [&](const Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    made.push_back(at::empty_strided(
        tensor.sizes(), tensor.strides(), tensor.options().device(call.device)));
    return made.back();
  };
  return convert_tensors(like, make, kLate);
}

std::vector<Tensor> flatten(const std::vector<IValue>& results) {
  std::vector<Tensor> found;
  for (const IValue& result : results) {
    if (result.isTensor() && result.toTensor().defined())
      found.push_back(result.toTensor());
    if (result.isTensorList())
      for (const Tensor& tensor : result.toTensorVector())
        found.push_back(tensor);
  }
  return found;
}

bool needs_values(const Call& call) {
  for (const auto& result : call.op.schema().returns()) {
    auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType)
      return true;
  }
  return false;
}

// An empty tensor given as `out` is resized.
void resize_written(const IValue& written, const IValue& like) {
  if (written.isTensor() && written.toTensor().numel() == 0 && like.isTensor())
    written.toTensor().resize_(like.toTensor().sizes());
}

std::optional<std::vector<IValue>> infer_shapes(const Call& call) {
  if (needs_values(call))
    return std::nullopt;
  bool writes_only = true;
  std::vector<IValue> written;
  for (size_t i = 0; i < call.op.schema().returns().size(); ++i) {
    auto found = find_written(call, i);
    bool is_full = found.has_value() && !(found->isTensor() && found->toTensor().numel() == 0);
    writes_only = writes_only && is_full;
    written.push_back(found.value_or(IValue()));
  }
  if (writes_only)
    return written;
  try {
    OutsideModes outside;
    auto stack = call.to_meta();
    call.op.callBoxed(stack);
    auto found = results_of(call, stack);
    for (size_t i = 0; i < found.size(); ++i)
      resize_written(written[i], found[i]);
    return found;
  } catch (const std::exception&) {
    return std::nullopt; // the CPU's operator decides, which also has the right error
  }
}

std::vector<IValue> run(Call call) {
  c10::DeviceGuard guard(call.device);
  auto stream = current_stream(call.device.index());
  auto shapes = infer_shapes(call);
  auto stack = call.to_cpu();
  std::vector<IValue> returned;
  std::vector<Tensor> made;
  if (!shapes.has_value()) {
    wait_on_host(stream);
    std::vector<IValue> computed;
    {
      OutsideModes outside;
      computed = results_of(call, run_on_cpu(call, stack));
    }
    std::vector<IValue> fresh;
    for (size_t i = 0; i < computed.size(); ++i) {
      auto written = find_written(call, i);
      bool is_resized = written.has_value() && written->isTensor() &&
          written->toTensor().numel() == 0 && computed[i].toTensor().numel() > 0;
      if (is_resized) {
        resize_written(*written, computed[i]);
        made.push_back(written->toTensor());
      }
      if (is_resized || !written.has_value())
        fresh.push_back(computed[i]);
      returned.push_back(
          written.has_value() ? *written : make_results(call, computed[i], made));
    }
    auto values = flatten(fresh);
    for (size_t i = 0; i < made.size(); ++i) {
      auto to = as_cpu(made[i]), from = values[i].clone();
      enqueue(stream, [to, from] { to.copy_(from); });
    }
    return returned;
  }
  std::vector<size_t> fresh;
  bool is_view = false;
  for (size_t i = 0; i < shapes->size(); ++i) {
    const IValue& like = (*shapes)[i];
    if (auto written = find_written(call, i)) {
      returned.push_back(*written);
    } else if (const Tensor* viewed = find_viewed(call, i)) {
      auto found = like.toTensor();
      returned.push_back(viewed->as_strided(
          found.sizes(), found.strides(), viewed->storage_offset() + found.storage_offset()));
      is_view = true;
    } else {
      fresh.push_back(i);
      returned.push_back(make_results(call, like, made));
    }
  }
  if (is_view)
    return returned;
  std::vector<Tensor> targets;
  for (const Tensor& tensor : made)
    targets.push_back(as_cpu(tensor));
  call.args.clear(); // the task must not hold memory, which may be lent again before it runs
  enqueue(stream, [call, stack, fresh, targets] {
    auto results = results_of(call, run_on_cpu(call, stack));
    std::vector<IValue> wanted;
    for (auto i : fresh)
      wanted.push_back(results[i]);
    auto values = flatten(wanted);
    TORCH_CHECK(values.size() == targets.size(), call.op.schema().name(), " on late");
    for (size_t i = 0; i < targets.size(); ++i)
      targets[i].copy_(values[i]);
  });
  return returned;
}

Call make_call(const c10::OperatorHandle& op, Stack args) {
  std::optional<c10::Device> device;
  int64_t count = 0;
  auto look = [&](const Tensor& tensor) {
    if (is_late(tensor) && !device.has_value()) {
      device = tensor.device();
      count = tensor.numel();
    }
    return tensor;
  };
  for (const IValue& arg : args) {
    convert_tensors(arg, look, kLate);
    if (!device.has_value() && arg.isDevice() && arg.toDevice().type() == kLate)
      device = arg.toDevice();
  }
  auto index = device.has_value() && device->index() >= 0 ? device->index() : current_device();
  Call call{op, std::move(args), c10::Device(kLate, index)};
  const auto& arguments = op.schema().arguments();
  void* generator = nullptr;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->str().find("Generator") == std::string::npos)
      continue;
    call.generator_at = int(i);
    if (call.args[i].isGenerator())
      generator = call.args[i].toGenerator().unsafeGetGeneratorImpl();
  }
  if (call.generator_at >= 0 || op.hasTag(at::Tag::nondeterministic_seeded))
    call.seed = draw_seed(index, generator, count);
  return call;
}

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  auto count = op.schema().arguments().size();
  Stack args(stack->end() - int64_t(count), stack->end());
  stack->resize(stack->size() - count);
  for (auto& result : run(make_call(op, std::move(args))))
    stack->push_back(std::move(result));
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  static auto op = find("aten::convolution");
  Stack args;
  torch::jit::push(
      args, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  return run(make_call(op, std::move(args)))[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient,
    const Tensor& input,
    const Tensor& weight,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  static auto op = find("aten::convolution_backward");
  std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  Stack args;
  torch::jit::push(
      args,
      gradient,
      input,
      weight,
      std::optional<IntArrayRef>(bias),
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups,
      std::vector<bool>(mask.begin(), mask.end()));
  auto made = run(make_call(op, std::move(args)));
  auto tensor = [](const IValue& value) { return value.isTensor() ? value.toTensor() : Tensor(); };
  return {tensor(made[0]), tensor(made[1]), tensor(made[2])};
}

int64_t choose_attention(
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const std::optional<Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return int64_t(sdp::SDPBackend::math);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

// A copy reads through both bits itself, as that of the CPU does.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace late

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::choose_attention)
} // namespace at::native
