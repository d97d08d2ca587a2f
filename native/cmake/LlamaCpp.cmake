# The pinned llama-cpp-python to build against. Sets, unless all three are given on the command line:
#   LLAMA_CPP_INCLUDE       public headers (ggml.h, ggml-backend.h, llama.h)
#   LLAMA_CPP_LIB           directory of libggml-base and the other libraries
#   GGML_INTERNAL_INCLUDE   ggml-backend-impl.h, ggml-impl.h and what they include
# and LLAMA_CPP_VERSION. Python_EXECUTABLE picks the environment whose llama-cpp-python is meant.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

if(NOT (LLAMA_CPP_INCLUDE AND LLAMA_CPP_LIB AND GGML_INTERNAL_INCLUDE))
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/../tools/headers.py"
    OUTPUT_VARIABLE _found
    RESULT_VARIABLE _status)
  if(NOT _status EQUAL 0)
    message(FATAL_ERROR "headers of the pinned llama-cpp-python not found (see above)")
  endif()
  string(JSON LLAMA_CPP_VERSION GET "${_found}" version)
  string(JSON LLAMA_CPP_INCLUDE GET "${_found}" include)
  string(JSON LLAMA_CPP_LIB GET "${_found}" lib)
  string(JSON GGML_INTERNAL_INCLUDE GET "${_found}" internal)
endif()
message(STATUS "llama.cpp headers: ${LLAMA_CPP_INCLUDE}; internal: ${GGML_INTERNAL_INCLUDE}; libraries: ${LLAMA_CPP_LIB}")
