# Compile Horovod in half the time: its sources and Gloo's in fewer, larger translation units, and without the
# debug information and the second level of optimization that its setup.py asks for. Its loops over elements are
# vectorized at the first level too: it gives -ftree-vectorize itself.
set(CMAKE_UNITY_BUILD ON)
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -DNDEBUG" CACHE STRING "")

# What clashes with its neighbours is compiled alone: a name of allreduce.cc, the macro LOG of TensorFlow.
# TensorFlow's Horovod takes a copy of Gloo in C++17.
function(compile_alone)
  foreach(gloo gloo compatible17_gloo)
    if(TARGET ${gloo})
      set_source_files_properties("${CMAKE_SOURCE_DIR}/third_party/${gloo}/gloo/allreduce_local.cc"
        TARGET_DIRECTORY ${gloo} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
  if(TARGET tensorflow)
    file(GLOB operations "${CMAKE_SOURCE_DIR}/horovod/tensorflow/*.cc")
    set_source_files_properties(${operations}
      TARGET_DIRECTORY tensorflow PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
endfunction()
if(CMAKE_PROJECT_NAME STREQUAL "horovod")
  cmake_language(DEFER CALL compile_alone)
endif()
