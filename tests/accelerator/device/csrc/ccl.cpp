// simccl: a c10d backend with NCCL's manners over gloo. Collectives are launched on a stream, in
// order within a group, and the host never waits for them; their work's wait() orders streams.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <c10/core/StreamGuard.h>

#include "ops.h"

namespace sim {
namespace {
using at::Tensor;
using Tensors = std::vector<Tensor>;
using c10d::ReduceOp;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Finish = std::function<void()>;

Tensor bytes_of(const Tensor& t) { return t.reshape({-1}).view(at::kByte); }
Tensor room_for(const Tensor& t, int64_t copies = 1) {
  return at::empty({int64_t(t.nbytes()) * copies}, at::TensorOptions().dtype(at::kByte));
}

// Sums are taken in the order of ranks, and in fp32 for shorter floats, so every rank has the same.
Tensor reduced(const Tensors& parts, const ReduceOp& op) {
  auto type = parts[0].scalar_type();
  bool longer = at::isReducedFloatingType(type);
  Tensor sum = longer ? parts[0].to(at::kFloat) : parts[0].clone();
  for (size_t i = 1; i < parts.size(); i++) {
    Tensor next = longer ? parts[i].to(at::kFloat) : parts[i];
    switch (op.op_) {
      case ReduceOp::SUM:
      case ReduceOp::AVG: sum.add_(next); break;
      case ReduceOp::PRODUCT: sum.mul_(next); break;
      case ReduceOp::MIN: sum = at::minimum(sum, next); break;
      case ReduceOp::MAX: sum = at::maximum(sum, next); break;
      case ReduceOp::BAND: sum.bitwise_and_(next); break;
      case ReduceOp::BOR: sum.bitwise_or_(next); break;
      case ReduceOp::BXOR: sum.bitwise_xor_(next); break;
      default: TORCH_CHECK(false, "simccl does not know this reduction");
    }
  }
  if (op.op_ == ReduceOp::AVG) sum.div_(int64_t(parts.size()));
  return sum.to(type);
}

// What a call does: begin() runs on the stream and starts gloo, what it returns waits and stores.
struct Job {
  std::string name;
  Tensors reads, writes;
  std::function<Finish(Tensors reads, Tensors writes)> begin;
};

struct Pending final : c10d::Work {
  MomentPtr over;
  int device;
  bool host_waits = false;
  Stream* on = nullptr;
  Tensors held;  // until somebody waits, so that their memory is not reused
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  ~Pending() override { let_go(false); }
  void let_go(bool waited) {
    if (!waited)
      for (auto& t : held)
        device_allocator().recordStream(t.storage().data_ptr(),
                                        c10::Stream(c10::Stream::UNSAFE, t.device(), on->id));
    held.clear();
  }
  bool isCompleted() override { return query(over); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    order(current_stream(device), over);
    if (host_waits) host_wait("barrier", over);
    let_go(true);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { order(current_stream(device), over); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

class Collectives final : public c10d::Backend {
 public:
  Collectives(BackendPtr gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return launched_; }

  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    std::vector<Job> jobs;
    jobs.swap(waiting_);
    if (jobs.empty()) return nullptr;
    return launch(std::move(jobs), true);
  }

  WorkPtr broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override {
    Tensors reads = rank_ == o.rootRank ? ts : Tensors{}, writes = rank_ == o.rootRank ? Tensors{} : ts;
    return submit({"broadcast", reads, writes, [gloo = gloo_, o](Tensors r, Tensors w) -> Finish {
                     Tensor to = r.empty() ? w[0] : r[0];
                     Tensors data{bytes_of(to).clone()};
                     auto work = gloo->broadcast(data, o);
                     return [=] {
                       work->wait();
                       if (r.empty()) bytes_of(to).copy_(data[0]);
                     };
                   }}, o.asyncOp);
  }
  WorkPtr allreduce(Tensors& ts, const c10d::AllreduceOptions& o) override { return all_reduce(ts, o.reduceOp, o.asyncOp); }
  WorkPtr allreduce_coalesced(Tensors& ts, const c10d::AllreduceCoalescedOptions& o) override {
    return all_reduce(ts, o.reduceOp, o.asyncOp);
  }
  WorkPtr reduce(Tensors& ts, const c10d::ReduceOptions& o) override {
    return submit({"reduce", ts, ts, [this, op = o.reduceOp, root = o.rootRank](Tensors r, Tensors w) -> Finish {
                     auto all = gather_all(r[0]);
                     return [=, this] {
                       Tensor sum = reduced(all(), op);
                       if (rank_ == root) w[0].copy_(sum.view_as(w[0]));
                     };
                   }}, o.asyncOp);
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return submit({"all_gather", ins, outs.at(0), [this](Tensors r, Tensors w) -> Finish {
                     auto all = gather_all(r[0]);
                     return [=] {
                       auto parts = all();
                       for (size_t i = 0; i < w.size(); i++) w[i].copy_(parts[i].view_as(w[i]));
                     };
                   }}, o.asyncOp);
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return submit(gather_into(out, in), o.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    std::vector<Job> jobs;
    for (size_t i = 0; i < outs.size(); i++) jobs.push_back(gather_into(outs[i], ins[i]));
    return launch(std::move(jobs), o.asyncOp);
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override {
    return submit({"reduce_scatter", ins.at(0), outs, [this, op = o.reduceOp](Tensors r, Tensors w) -> Finish {
                     Tensors flat;
                     for (auto& t : r) flat.push_back(t.reshape({-1}));
                     auto all = scatter_rows(at::cat(flat));
                     return [=] { w[0].copy_(reduced(all(), op).view_as(w[0])); };
                   }}, o.asyncOp);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return submit(reduce_into(out, in, o.reduceOp), o.asyncOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    std::vector<Job> jobs;
    for (size_t i = 0; i < outs.size(); i++) jobs.push_back(reduce_into(outs[i], ins[i], o.reduceOp));
    return launch(std::move(jobs), o.asyncOp);
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to_splits, std::vector<int64_t>& from_splits,
                        const c10d::AllToAllOptions& o) override {
    auto in_bytes = [](const Tensor& t, std::vector<int64_t> splits) {
      for (auto& s : splits) s *= t.size(0) ? int64_t(t.nbytes()) / t.size(0) : 0;
      return splits;
    };
    auto received = in_bytes(out, to_splits), sent = in_bytes(in, from_splits);
    return submit({"all_to_all", {in}, {out}, [this, received, sent](Tensors r, Tensors w) mutable -> Finish {
                     Tensor data = bytes_of(r[0]).clone(), got = room_for(w[0]);
                     auto work = gloo_->alltoall_base(got, data, received, sent);
                     return [=] {
                       work->wait();
                       bytes_of(w[0]).copy_(got);
                     };
                   }}, o.asyncOp);
  }
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& o) override {
    return submit({"all_to_all", ins, outs, [this](Tensors r, Tensors w) -> Finish {
                     Tensors flat;
                     std::vector<int64_t> sent, received;
                     int64_t room = 0;
                     for (auto& t : r) flat.push_back(bytes_of(t)), sent.push_back(t.nbytes());
                     for (auto& t : w) received.push_back(t.nbytes()), room += t.nbytes();
                     Tensor data = at::cat(flat), got = at::empty({room}, at::kByte);
                     auto work = gloo_->alltoall_base(got, data, received, sent);
                     return [=] {
                       work->wait();
                       auto parts = got.split_with_sizes(received);
                       for (size_t i = 0; i < w.size(); i++) bytes_of(w[i]).copy_(parts[i]);
                     };
                   }}, o.asyncOp);
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) override {
    return submit({"gather", ins, rank_ == o.rootRank ? outs.at(0) : Tensors{}, [this](Tensors r, Tensors w) -> Finish {
                     auto all = gather_all(r[0]);
                     return [=] {
                       auto parts = all();
                       for (size_t i = 0; i < w.size(); i++) w[i].copy_(parts[i].view_as(w[i]));
                     };
                   }}, o.asyncOp);
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    bool root = rank_ == o.rootRank;
    return submit({"scatter", root ? ins.at(0) : Tensors{}, outs, [this, root, from = o.rootRank](Tensors r, Tensors w) -> Finish {
                     Tensors flat;
                     std::vector<int64_t> sent(size_, root ? w[0].nbytes() : 0), received(size_, 0);
                     received[from] = w[0].nbytes();
                     for (auto& t : r) flat.push_back(bytes_of(t));
                     Tensor data = root ? at::cat(flat) : at::empty({0}, at::kByte), got = room_for(w[0]);
                     auto work = gloo_->alltoall_base(got, data, received, sent);
                     return [=] {
                       work->wait();
                       bytes_of(w[0]).copy_(got);
                     };
                   }}, o.asyncOp);
  }
  WorkPtr send(Tensors& ts, int to, int tag) override {
    return submit({"send", ts, {}, [this, to, tag](Tensors r, Tensors) -> Finish {
                     Tensors data{bytes_of(r[0]).clone()};
                     auto work = gloo_->send(data, to, tag);
                     return [=] { work->wait(); };
                   }}, true);
  }
  WorkPtr recv(Tensors& ts, int from, int tag) override {
    return submit({"recv", {}, ts, [this, from, tag](Tensors, Tensors w) -> Finish {
                     Tensors data{room_for(w[0])};
                     auto work = gloo_->recv(data, from, tag);
                     return [=] {
                       work->wait();
                       bytes_of(w[0]).copy_(data[0]);
                     };
                   }}, true);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return launch({{"barrier", {}, {}, [this](Tensors, Tensors) -> Finish {
                      auto work = gloo_->barrier();
                      return [=] { work->wait(); };
                    }}}, true, true);
  }

 private:
  BackendPtr gloo_;
  MomentPtr last_;  // one communicator: what was launched first, runs first
  std::map<int, Stream*> own_;
  std::vector<Job> waiting_;
  bool coalescing_ = false;
  uint64_t launched_ = 0;

  using Parts = std::function<Tensors()>;
  Parts gather_all(const Tensor& t) {
    Tensor data = bytes_of(t).clone(), got = room_for(t, size_);
    auto work = gloo_->_allgather_base(got, data);
    return [=, n = size_] {
      work->wait();
      return got.view(t.scalar_type()).chunk(n);
    };
  }
  Parts scatter_rows(const Tensor& t) {  // of this rank's row, what every rank has
    Tensor data = bytes_of(t).clone(), got = room_for(t);
    std::vector<int64_t> even;
    auto work = gloo_->alltoall_base(got, data, even, even);
    return [=, n = size_] {
      work->wait();
      return got.view(t.scalar_type()).chunk(n);
    };
  }
  Job gather_into(const Tensor& out, const Tensor& in) {
    TORCH_CHECK(out.numel() == in.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
    return {"all_gather", {in}, {out}, [this](Tensors r, Tensors w) -> Finish {
              auto all = gather_all(r[0]);
              return [=] { w[0].copy_(at::cat(all()).view_as(w[0])); };
            }};
  }
  Job reduce_into(const Tensor& out, const Tensor& in, const ReduceOp& op) {
    TORCH_CHECK(in.numel() == out.numel() * size_, "input tensor must be the same size as output size times world size");
    return {"reduce_scatter", {in}, {out}, [this, op](Tensors r, Tensors w) -> Finish {
              auto all = scatter_rows(r[0]);
              return [=] { w[0].copy_(reduced(all(), op).view_as(w[0])); };
            }};
  }
  WorkPtr all_reduce(const Tensors& ts, const ReduceOp& op, bool async) {
    return submit({"all_reduce", ts, ts, [this, op](Tensors r, Tensors w) -> Finish {
                     std::vector<Parts> all;
                     for (auto& t : r) all.push_back(gather_all(t));
                     return [=] {
                       for (size_t i = 0; i < w.size(); i++) w[i].copy_(reduced(all[i](), op).view_as(w[i]));
                     };
                   }}, async);
  }

  WorkPtr submit(Job job, bool async) {
    if (!coalescing_) return launch({std::move(job)}, async);
    waiting_.push_back(std::move(job));
    return nullptr;
  }

  // As NCCL: an asynchronous call runs on the group's own stream, another on the current one.
  WorkPtr launch(std::vector<Job> jobs, bool async, bool host_waits = false) {
    launched_++;
    int device = current_device();
    std::string name = "simccl " + jobs[0].name;
    if (jobs.size() > 1) name += " coalesced";
    std::vector<Use> uses;
    struct Ready {
      std::function<Finish(Tensors, Tensors)> begin;
      Tensors reads, writes;
    };
    std::vector<Ready> ready;
    auto work = c10::make_intrusive<Pending>();
    for (auto& job : jobs) {
      Ready r{job.begin, {}, {}};
      for (bool read : {true, false})
        for (auto& t : read ? job.reads : job.writes) {
          TORCH_CHECK(on_sim(t) && t.is_contiguous(), name, ": tensors must be contiguous, and on the simulated device");
          device = t.device().index();
          uses.push_back(use_of(t, read, !read, name));
          (read ? r.reads : r.writes).push_back(stream_view(t));
          work->held.push_back(t);
          if (!read) work->outputs.push_back(t);
        }
      ready.push_back(std::move(r));
    }
    c10::DeviceGuard here(c10::Device(kSim, device));
    Stream& current = current_stream(device);
    if (async && !own_[device]) own_[device] = &stream(device, next_pool_stream(device, false));
    Stream& on = async ? *own_[device] : current;
    if (async) order(on, record(current));
    auto before = last_, after = std::make_shared<Moment>();
    last_ = after;
    enqueue(on, name, uses, [ready, before, after, alive = c10::intrusive_ptr<Collectives>::reclaim_copy(this)] {
      if (before) before->wait();
      try {
        std::vector<Finish> finish;
        for (auto& r : ready) finish.push_back(r.begin(r.reads, r.writes));
        for (auto& f : finish) f();
      } catch (...) {
        after->set();
        throw;
      }
      after->set();
    });
    work->device = device;
    work->on = &on;
    work->host_waits = host_waits;
    work->over = record(on);
    c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kSim, device), on.id);
    c10::StreamGuard guard(stream);
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                            std::vector<c10::Device>{c10::Device(kSim, device)});
    work->future->markCompleted(c10::IValue(work->outputs));
    return work;
  }
};
}  // namespace

BackendPtr make_collectives(BackendPtr gloo, int rank, int size) {
  return c10::make_intrusive<Collectives>(std::move(gloo), rank, size);
}
}  // namespace sim
