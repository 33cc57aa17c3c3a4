// A c10d backend that moves bytes by gloo and answers as ProcessGroupNCCL does since PyTorch 2.8:
// a synchronous collective returns no Work; sends and receives of a batch return none either, and the batch one
// for all; after abort() nothing more can be asked of it. It writes the lines for developers, and plays the watchdog:
// where a connection is lost before abort(), the group's end has to wait. With STANDIN_AHEAD=1 the host runs ahead of
// the device: the host waits where it synchronizes, until done() of its collectives are all that it has begun().
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>

using namespace c10d;
using Answer = c10::intrusive_ptr<Work>;

// Several sends and receives that were begun together.
class Batch : public Work {
 public:
  std::vector<Answer> parts;
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& part : parts) part->wait(timeout);
    done_ = true;
    return true;
  }
  bool isCompleted() override { return done_; }

 private:
  std::atomic<bool> done_{false};
};

// What the device of this process has not done yet, in order.
static std::mutex ahead_lock;
static std::deque<Answer> ahead;
static size_t begun = 0;

static size_t done() {
  std::lock_guard<std::mutex> held(ahead_lock);
  // NCCL hears nothing of a process that has ended, so what gloo refuses then is never done.
  while (!ahead.empty() && ahead.front()->isCompleted() && !ahead.front()->exception()) ahead.pop_front();
  return begun - ahead.size();
}

class NcclLike : public Backend {
 public:
  explicit NcclLike(c10::intrusive_ptr<Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  ~NcclLike() override {
    if (!failed_) return;
    LOG(ERROR) << "failure detected by watchdog\nframe #0: a stand-in";
    auto given = std::getenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC");
    std::this_thread::sleep_for(std::chrono::milliseconds(4 * (given ? std::atoi(given) : 15000)));
  }

  // From now on every collective fails as NCCL's first one does where it cannot make a communicator.
  void refuse(std::string why) { refusal_ = std::move(why); }

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void shutdown() override { gloo_->shutdown(); }
  void abort() override { aborted_ = true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }

  void startCoalescing() override { batch_ = c10::make_intrusive<Batch>(); }
  Answer endCoalescing() override {
    auto batch = std::move(batch_);
    batch_ = nullptr;
    return batch && !batch->parts.empty() ? Answer(batch) : nullptr;
  }

#define COLLECTIVE(name, parameters, arguments) \
  Answer name parameters override { return collective(gloo_->name arguments, opts.asyncOp); }
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using Sizes = std::vector<int64_t>;
  COLLECTIVE(broadcast, (Tensors& t, const BroadcastOptions& opts), (t, opts))
  COLLECTIVE(allreduce, (Tensors& t, const AllreduceOptions& opts), (t, opts))
  COLLECTIVE(allreduce_coalesced, (Tensors& t, const AllreduceCoalescedOptions& opts), (t, opts))
  COLLECTIVE(reduce, (Tensors& t, const ReduceOptions& opts), (t, opts))
  COLLECTIVE(allgather, (Lists& out, Tensors& in, const AllgatherOptions& opts), (out, in, opts))
  COLLECTIVE(_allgather_base, (at::Tensor& out, at::Tensor& in, const AllgatherOptions& opts), (out, in, opts))
  COLLECTIVE(allgather_into_tensor_coalesced, (Tensors& out, Tensors& in, const AllgatherOptions& opts), (out, in, opts))
  COLLECTIVE(gather, (Lists& out, Tensors& in, const GatherOptions& opts), (out, in, opts))
  COLLECTIVE(scatter, (Tensors& out, Lists& in, const ScatterOptions& opts), (out, in, opts))
  COLLECTIVE(reduce_scatter, (Tensors& out, Lists& in, const ReduceScatterOptions& opts), (out, in, opts))
  COLLECTIVE(_reduce_scatter_base, (at::Tensor& out, at::Tensor& in, const ReduceScatterOptions& opts), (out, in, opts))
  COLLECTIVE(reduce_scatter_tensor_coalesced, (Tensors& out, Tensors& in, const ReduceScatterOptions& opts), (out, in, opts))
  COLLECTIVE(alltoall, (Tensors& out, Tensors& in, const AllToAllOptions& opts), (out, in, opts))
  COLLECTIVE(alltoall_base, (at::Tensor& out, at::Tensor& in, Sizes& a, Sizes& b, const AllToAllOptions& opts), (out, in, a, b, opts))
  COLLECTIVE(barrier, (const BarrierOptions& opts), (opts))
#undef COLLECTIVE

  Answer send(Tensors& t, int to, int tag) override { return alone_or_in_batch(gloo_->send(t, to, tag)); }
  Answer recv(Tensors& t, int from, int tag) override { return alone_or_in_batch(gloo_->recv(t, from, tag)); }

 private:
  c10::intrusive_ptr<Backend> gloo_;
  c10::intrusive_ptr<Batch> batch_;
  std::atomic<bool> aborted_{false}, failed_{false};
  std::string refusal_;

  Answer collective(Answer work, bool async) {
    if (!refusal_.empty()) C10_THROW_ERROR(DistBackendError, refusal_);
    if (aborted_) throw std::runtime_error("NCCL communicator was aborted on rank " + std::to_string(rank_));
    if (std::getenv("STANDIN_AHEAD")) {
      std::lock_guard<std::mutex> held(ahead_lock);
      ahead.push_back(work);
      ++begun;
      return async ? work : nullptr;
    }
    if (async) return work;
    auto held = PyGILState_Check() ? std::make_unique<pybind11::gil_scoped_release>() : nullptr;
    try {
      work->wait();
    } catch (...) {
      failed_ = !aborted_;
      throw;
    }
    return nullptr;
  }

  Answer alone_or_in_batch(Answer work) {
    if (!batch_) {
      TORCH_WARN_ONCE("An unbatched P2P op (send/recv) was called on this ProcessGroup");
      return work;
    }
    batch_->parts.push_back(std::move(work));
    return nullptr;
  }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::module_::import("torch._C._distributed_c10d");
  pybind11::class_<NcclLike, c10::intrusive_ptr<NcclLike>, Backend>(m, "NcclLike")
      .def(pybind11::init<c10::intrusive_ptr<Backend>>())
      .def("refuse", &NcclLike::refuse);
  m.def("done", &done);
  m.def("begun", [] { return begun; });
}
