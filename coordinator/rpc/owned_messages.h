// Requests that a handler may take apart.
#ifndef MUSTER_COORDINATOR_RPC_OWNED_MESSAGES_H_
#define MUSTER_COORDINATOR_RPC_OWNED_MESSAGES_H_

#include <grpcpp/grpcpp.h>

namespace muster::coordinator {

// Allocates the messages of a unary call. gRPC shows a handler its request as const, so that what
// is kept of it has to be copied; of a call whose messages are from here a handler can move it.
// Thread-safe. Outlives the server.
template <typename Request, typename Response>
class OwnedMessages : public grpc::MessageAllocator<Request, Response> {
 public:
  grpc::MessageHolder<Request, Response>* AllocateMessages() override { return new Messages; }

  // The request of this call. Requires: its messages are from an object of this class.
  static Request& RequestOf(grpc::CallbackServerContext& context) {
    return static_cast<Messages*>(context.GetRpcAllocatorState())->owned_request;
  }

 private:
  struct Messages : grpc::MessageHolder<Request, Response> {
    Messages() {
      this->set_request(&owned_request);
      this->set_response(&owned_response);
    }
    void Release() override { delete this; }

    Request owned_request;
    Response owned_response;
  };
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_OWNED_MESSAGES_H_
